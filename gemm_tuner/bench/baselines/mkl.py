"""Intel MKL, loaded from its wheel: its product, and a pass for what it lacks."""

import ctypes
from pathlib import Path

import numpy as np

from gemm_tuner.arrays.views import NUMPY_TYPES
from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Materials, Package, Row
from gemm_tuner.bench.c_runner import CRunner
from gemm_tuner.bench.passes import PassStruct, finish, openmp_team
from gemm_tuner.bench.workload import Workload, aligned_copy
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.wheels import find_in_wheel, installed_wheels, wheel_version
from gemm_tuner.machine.memory import address_of

_WHEEL = "mkl"
_LIBRARY = "libmkl_rt.so.3"
START_S = 0.3
_INSTALL = 'pip install "gemm-tuner[peers]"'
# `mkl_product` of bench/native/mkl.c by the types of x and w, and the type of its results.
_PRODUCTS: dict[tuple[DType, DType], tuple[int, DType]] = {
    (DType.F32, DType.F32): (0, DType.F32),
    (DType.BF16, DType.BF16): (1, DType.F32),
    (DType.U8, DType.S8): (2, DType.S32),
}


def mkl_text() -> str:
    """Return the name and version of the installed MKL.

    Raises:
        BaselineMissing: there is none.
    """
    return f"{_WHEEL} {wheel_version(_WHEEL, install=_INSTALL)}"


def find_mkl() -> Path:
    """Return the library.

    Raises:
        BaselineMissing: the wheel is not installed.
    """
    return find_in_wheel(_WHEEL, _LIBRARY, install=_INSTALL)


def mkl_packages() -> list[Package]:
    """Return what takes part in a race."""
    return [Package(text, START_S) for text in installed_wheels(_WHEEL)]


class _LayerStruct(ctypes.Structure):
    """`mkl_layer` of bench/native/mkl.c."""

    _fields_ = (
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("w_leading_dimension", ctypes.c_int32),
        ("w_is_transposed", ctypes.c_int32),
        ("product", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("after", PassStruct),
    )


class Mkl(AnyBaseline):
    """MKL with weights packed once, or with w as it comes with each call.

    A pass makes y of its results, which are float32 or integers.

    Its threads are chosen by MKL_THREADING_LAYER, which must be set before it is loaded.
    """

    fuses_epilogue = True
    is_of_openmp = True

    def __init__(self, drivers: tuple[Path, Path]) -> None:
        """Find the library; it is loaded when it is needed, because it is visible to all others.

        Raises:
            BaselineMissing: the wheel is not installed.
        """
        self._library = find_mkl()
        self._driver, self._pass = drivers
        self._version = mkl_text()

    def check_problem(self, problem: Problem) -> None:
        """Refuse types that there is no product of.

        Raises:
            BaselineMissing: MKL does not multiply such types.
        """
        types = problem.types
        if (types.x, types.w) not in _PRODUCTS:
            raise BaselineMissing(f"MKL does not compute {types.text}; choose another baseline.")

    def prepare(self, workload: Workload) -> "_MklRunner":
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: MKL does not load.
        """
        try:
            ctypes.CDLL(str(self._library), mode=ctypes.RTLD_GLOBAL)
            driver = ctypes.CDLL(str(self._driver))
        except OSError as error:
            raise BaselineMissing(
                f"MKL does not load: {error}; run: pip install --force-reinstall mkl."
            ) from error
        driver.mkl_packed_weight_bytes.restype = ctypes.c_uint64
        runner = _MklRunner(driver, self._pass, workload)
        self.text = f"{self._version} + pass" if runner.has_pass else self._version
        self.implementation = "product, then a pass" if runner.has_pass else "product"
        return runner


class _MklRunner(CRunner):
    packs_each_copy = True  # what is packed begins at a huge page, wherever in the block that is

    def __init__(self, driver: ctypes.CDLL, pass_library: Path, workload: Workload) -> None:
        problem = workload.problem
        self._driver = driver
        self._w = workload.w
        product, product_type = _PRODUCTS[problem.types.x, problem.types.w]
        writes_y = problem.types.y is product_type
        y = workload.y
        if not writes_y:
            y = aligned_copy(np.zeros(y.shape, NUMPY_TYPES[product_type]))
        self.has_pass = bool(problem.epilogue.steps) or not writes_y
        after = (
            finish(pass_library, workload, y, fused=0, team=openmp_team(workload.threads))
            if self.has_pass
            else None
        )
        self._kept = (y, after)
        layer = _LayerStruct(
            workload.rows,
            problem.n,
            problem.k,
            max(1, workload.w.shape[1]),
            problem.w_layout is WeightLayout.NK,
            product,
            address_of(workload.x),
            address_of(y),
            None if problem.operation.packs_ahead else address_of(workload.w),
            after.struct if after else PassStruct(),
        )
        super().__init__(driver.mkl_time, ctypes.byref(layer))

    @property
    def packed_weight_bytes(self) -> int:
        size: int = self._driver.mkl_packed_weight_bytes(self._layer)
        return size

    def pack(self, address: int) -> None:
        self._driver.mkl_pack_weights(
            self._layer,
            ctypes.c_void_p(address_of(self._w)),
            ctypes.c_void_p(address),
        )


def _find(materials: Materials) -> list[Copy]:
    drivers = (materials.drivers.mkl, materials.drivers.finish)
    return [Copy(package=mkl_text(), baseline=Mkl(drivers), start_s=START_S)]


ROWS = (
    Row(
        name="mkl",
        place=2,
        find=_find,
        installed=mkl_packages,
        is_raced=True,
        takes_activations=True,
    ),
)
