"""The OpenBLAS that NumPy brings along: the product alone, which is an advantage to it."""

import ctypes
import re
from pathlib import Path

import numpy as np

from gemm_tuner.bench.baselines.baseline import CBaseline
from gemm_tuner.bench.c_runner import CRunnerOfArray
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import F32
from gemm_tuner.domain.problem import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.machine.memory import address_of


class _LayerStruct(ctypes.Structure):
    """`openblas_layer` of bench/native/openblas.c."""

    _fields_ = (
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


class OpenBlas(CBaseline):
    """OpenBLAS, which packs the weights in each call and leaves the epilogue to the caller."""

    fuses_epilogue = False

    def __init__(self, driver: Path) -> None:
        """Find the library that NumPy uses and load its driver.

        Raises:
            BaselineMissing: this NumPy uses another library, or it does not load.
        """
        path = find_openblas()
        try:
            self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            self._driver = ctypes.CDLL(str(driver))
            self._library.scipy_openblas_get_config64_.restype = ctypes.c_char_p
            config = self._library.scipy_openblas_get_config64_().decode()
        except (OSError, AttributeError) as error:
            raise BaselineMissing(
                f"the OpenBLAS of NumPy does not load: {error}; install NumPy from its wheel."
            ) from error
        version = re.search(r"\d+\.\d+\.\d+", config)
        self.text = f"openblas {version[0] if version else 'unknown'}"

    def prepare(self, workload: Workload) -> "_OpenBlasRunner":
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: the problem is not in float32.
        """
        if workload.problem.types != F32:
            raise BaselineMissing(
                f"OpenBLAS does not compute {workload.problem.types.text}; choose another baseline."
            )
        self._library.scipy_openblas_set_num_threads64_(ctypes.c_int(workload.threads))
        return _OpenBlasRunner(self._driver, workload)


class _OpenBlasRunner(CRunnerOfArray):
    def __init__(self, driver: ctypes.CDLL, workload: Workload) -> None:
        problem = workload.problem
        # OpenBLAS is up to 1.7 times as fast with w as (k, n), but for a single row of x.
        wanted = WeightLayout.NK if workload.rows == 1 else WeightLayout.KN
        is_as_wanted = problem.w_layout is wanted
        w = np.ascontiguousarray(workload.w if is_as_wanted else workload.w.T)
        layer = _LayerStruct(
            workload.rows,
            problem.n,
            problem.k,
            address_of(workload.x),
            address_of(workload.y),
        )
        super().__init__(driver.openblas_time, ctypes.byref(layer), w)


def find_openblas() -> Path:
    """Return the library that NumPy uses.

    Raises:
        BaselineMissing: it uses another one.
    """
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    for path in folder.glob("libscipy_openblas64_*.so"):
        return path
    raise BaselineMissing(
        f"no OpenBLAS lies beside NumPy ({folder}); install NumPy from its wheel."
    )
