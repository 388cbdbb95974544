"""libxsmm, which generates kernels for small products: the product alone, an advantage to it."""

import ctypes
from pathlib import Path

import numpy as np

from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Materials, Row
from gemm_tuner.bench.c_runner import CRunnerOfArray
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import F32
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.machine.memory import address_of

# What libxsmm itself calls small: larger products need a driver around its kernels.
_LARGEST_PRODUCT = 64**3


class _LayerStruct(ctypes.Structure):
    """`libxsmm_layer` of bench/native/libxsmm.c."""

    _fields_ = (
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
    )


class Libxsmm(AnyBaseline):
    """A kernel of libxsmm with the weights in its order, on one thread, which small sizes need.

    A w that comes with each call is multiplied as it is: it must be (k, n).
    """

    fuses_epilogue = False

    def __init__(self, driver: Path | None) -> None:
        """Load the driver with the library inside it.

        Raises:
            BaselineMissing: there is none.
        """
        if driver is None:
            raise BaselineMissing(
                "libxsmm is not installed (the compiler does not find version 1 of it); "
                "on Debian run: apt-get install libxsmm-dev."
            )
        try:
            self._driver = ctypes.CDLL(str(driver))
        except OSError as error:
            raise BaselineMissing(
                f"libxsmm does not load: {error}; choose another baseline."
            ) from error
        self._driver.libxsmm_driver_version.restype = ctypes.c_char_p
        self.text = f"libxsmm {self._driver.libxsmm_driver_version().decode()}"

    def prepare(self, workload: Workload) -> "_LibxsmmRunner":
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: the problem is not in float32, or not small, or w is not in its order.
        """
        problem = workload.problem
        if problem.types != F32:
            raise BaselineMissing(
                f"libxsmm does not compute {problem.types.text}; choose another baseline."
            )
        product = workload.rows * problem.n * problem.k
        if not 0 < product <= _LARGEST_PRODUCT:
            raise BaselineMissing(
                f"libxsmm is for small products, of m x n x k from 1 to {_LARGEST_PRODUCT}; "
                "choose another baseline."
            )
        if not problem.operation.packs_ahead and problem.w_layout is WeightLayout.NK:
            raise BaselineMissing(
                f"libxsmm has no kernel for a w of (n, k), as in {problem.text}; "
                "choose another baseline."
            )
        return _LibxsmmRunner(self._driver, workload)


class _LibxsmmRunner(CRunnerOfArray):
    def __init__(self, driver: ctypes.CDLL, workload: Workload) -> None:
        problem = workload.problem
        is_known = problem.operation.packs_ahead
        struct = _LayerStruct(
            workload.rows, problem.n, problem.k, address_of(workload.x), address_of(workload.y)
        )
        if not is_known:
            struct.w = address_of(workload.w)
        layer = ctypes.byref(struct)
        if driver.libxsmm_prepare(layer) != 0:
            raise BaselineMissing(
                f"libxsmm has no kernel for {problem.sizes_text}; choose another baseline."
            )
        is_nk = problem.w_layout is WeightLayout.NK
        w = np.ascontiguousarray(workload.w.T if is_nk else workload.w) if is_known else None
        super().__init__(driver.libxsmm_time, layer, w)


def _find(materials: Materials) -> list[Copy]:
    library = Libxsmm(materials.drivers.libxsmm)
    return [Copy(package=library.text, baseline=library)]


ROWS = (Row(name="libxsmm", place=4, find=_find, takes_activations=True),)
