"""The OpenBLAS that NumPy brings along: its product, and passes for what it lacks."""

import ctypes
from pathlib import Path

import numpy as np

from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Materials, Package, Row
from gemm_tuner.bench.c_runner import CRunnerOfArray
from gemm_tuner.bench.passes import Pass, PassStruct, convert, finish, openmp_team
from gemm_tuner.bench.workload import Workload, aligned_copy
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.openblas import OpenBlasLibrary, find_openblas
from gemm_tuner.machine.memory import address_of


class _LayerStruct(ctypes.Structure):
    """`openblas_layer` of bench/native/openblas.c."""

    _fields_ = (
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("w_is_transposed", ctypes.c_int32),
        ("before", PassStruct * 2),
        ("after", PassStruct),
    )


class OpenBlas(AnyBaseline):
    """OpenBLAS, which packs the weights in each call and multiplies in float32.

    Other floating-point types of x are converted by a pass before the product, those of w once, or
    in each call where w comes with it; another pass does the epilogue.
    """

    fuses_epilogue = True

    def __init__(self, library: Path, drivers: tuple[Path, Path]) -> None:
        """Remember where the library is, and the drivers: the loop and the pass."""
        self._path = library
        self._driver, self._pass = drivers

    def preload(self) -> None:
        """Do nothing: NumPy has loaded it."""

    def check_problem(self, problem: Problem) -> None:
        """Refuse integers.

        Raises:
            BaselineMissing: the problem is of integers.
        """
        types = problem.types
        if types.x.is_integer or types.w.is_integer:
            raise BaselineMissing(
                f"OpenBLAS does not compute {types.text}; choose another baseline."
            )

    def prepare(self, workload: Workload) -> "_OpenBlasRunner":
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: the library does not load.
        """
        try:
            # The loop finds its functions among the names that are visible to all.
            library = OpenBlasLibrary(ctypes.CDLL(str(self._path), mode=ctypes.RTLD_GLOBAL))
            driver = ctypes.CDLL(str(self._driver))
        except (OSError, AttributeError) as error:
            raise BaselineMissing(
                f"the OpenBLAS of NumPy does not load: {error}; install NumPy from its wheel."
            ) from error
        library.set_threads(workload.threads)
        runner = _OpenBlasRunner(driver, self._pass, workload)
        passes = " + pass" if runner.has_passes else ""
        self.text = f"{library.text}{passes}"
        self.implementation = "product in f32, then a pass" if passes else "product in f32"
        return runner


class _OpenBlasRunner(CRunnerOfArray):
    def __init__(self, driver: ctypes.CDLL, pass_library: Path, workload: Workload) -> None:
        problem = workload.problem
        team = openmp_team(workload.threads)
        x, w, y = workload.x, workload.w, workload.y
        before: list[Pass] = []
        after = None
        if problem.types.x is not DType.F32:
            x = aligned_copy(np.zeros(x.shape, np.float32))
            before.append(convert(pass_library, workload.x, x, team))
        layout = problem.w_layout
        if problem.operation.packs_ahead:
            # OpenBLAS is up to 1.7 times as fast with w as (k, n), but for a single row of x.
            layout = WeightLayout.NK if workload.rows == 1 else WeightLayout.KN
            is_as_wanted = problem.w_layout is layout
            w = np.ascontiguousarray(w if is_as_wanted else w.T, np.float32)
        elif problem.types.w is not DType.F32:
            w = aligned_copy(np.zeros(w.shape, np.float32))
            before.append(convert(pass_library, workload.w, w, team))
        if problem.types.y is not DType.F32:
            y = aligned_copy(np.zeros(y.shape, np.float32))
        if problem.epilogue.steps or y is not workload.y:
            after = finish(pass_library, workload, y, fused=0, team=team)
        self.has_passes = bool(before or after)
        self._kept = (x, w, y, before, after)
        layer = _LayerStruct(
            workload.rows,
            problem.n,
            problem.k,
            address_of(x),
            address_of(y),
            None if problem.operation.packs_ahead else address_of(w),
            layout is WeightLayout.NK,
            (PassStruct * 2)(*(one.struct for one in before)),
            after.struct if after else PassStruct(),
        )
        given = w if problem.operation.packs_ahead else None
        super().__init__(driver.openblas_time, ctypes.byref(layer), given)


def _find(materials: Materials) -> list[Copy]:
    drivers = (materials.drivers.openblas, materials.drivers.finish)
    return [
        Copy(package=package, baseline=OpenBlas(find_openblas(), drivers))
        for package, _start_s in _packages()
    ]


def _packages() -> list[Package]:
    return [Package(f"numpy {np.__version__}")]


ROWS = (
    Row(
        name="openblas",
        place=3,
        find=_find,
        installed=_packages,
        is_raced=True,
        takes_activations=True,
    ),
)
