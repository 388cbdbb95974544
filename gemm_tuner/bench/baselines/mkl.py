"""Intel MKL, of its own wheel or PyTorch's: its product, and a pass for what it lacks."""

import ctypes
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
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
# PyTorch has a copy, which shows its packed product of float32 alone.
_OF_TORCH = ("torch", "libtorch_cpu.so")
_START_OF_TORCH_S = 0.5
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
    """Return the installed wheel."""
    return [Package(text, START_S) for text in installed_wheels(_WHEEL)]


class _Found(NamedTuple):
    """A copy of MKL, and whether it is that of PyTorch."""

    text: str
    library: Path
    start_s: float
    is_of_torch: bool


def _found() -> _Found:
    """Return the copy of the wheel, or where there is none, that of PyTorch.

    Raises:
        BaselineMissing: there is neither.
    """
    try:
        return _Found(mkl_text(), find_mkl(), START_S, is_of_torch=False)
    except BaselineMissing:
        try:
            library = find_in_wheel(*_OF_TORCH, install=_INSTALL)
        except BaselineMissing:
            pass
        else:
            return _Found(_text_of_torch(), library, _START_OF_TORCH_S, is_of_torch=True)
        raise


def _text_of_torch() -> str:
    return f"{_WHEEL} torch-{wheel_version(_OF_TORCH[0], install=_INSTALL)}"


def _raced_packages() -> list[Package]:
    """Return what takes part in a race."""
    of_torch = installed_wheels(_OF_TORCH[0])
    return mkl_packages() or [Package(_text_of_torch(), _START_OF_TORCH_S) for _torch in of_torch]


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

    def __init__(self, found: _Found, drivers: tuple[Path, Path]) -> None:
        """Take a copy; it is loaded when it is needed, because it is visible to all others."""
        self._found = found
        self._driver, self._pass = drivers

    def check_problem(self, problem: Problem) -> None:
        """Refuse types that there is no product of.

        Raises:
            BaselineMissing: MKL does not multiply such types.
        """
        types = problem.types
        if (types.x, types.w) not in _PRODUCTS:
            raise BaselineMissing(f"MKL does not compute {types.text}; choose another baseline.")
        if self._found.is_of_torch and types.x is not DType.F32:
            raise BaselineMissing(
                f"PyTorch's MKL is called for float32 alone, not {types.text}; run: {_INSTALL}."
            )

    def prepare(self, workload: Workload) -> "_MklRunner":
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: MKL does not load.
        """
        if self._found.is_of_torch and workload.threads > 1:
            raise BaselineMissing(f"PyTorch's MKL is called on one thread alone; run: {_INSTALL}.")
        try:
            ctypes.CDLL(str(self._found.library), mode=ctypes.RTLD_GLOBAL)
            driver = ctypes.CDLL(str(self._driver))
        except OSError as error:
            again = _INSTALL if self._found.is_of_torch else "pip install --force-reinstall mkl"
            raise BaselineMissing(f"MKL does not load: {error}; run: {again}.") from error
        driver.mkl_packed_weight_bytes.restype = ctypes.c_uint64
        runner = _MklRunner(driver, self._pass, workload)
        self.text = f"{self._found.text} + pass" if runner.has_pass else self._found.text
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
    found = _found()
    return [Copy(package=found.text, baseline=Mkl(found, drivers), start_s=found.start_s)]


ROWS = (
    Row(
        name="mkl",
        place=2,
        find=_find,
        installed=_raced_packages,
        is_raced=True,
        takes_activations=True,
    ),
)
