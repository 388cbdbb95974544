"""Intel MKL, loaded from its wheel: the product alone, which is an advantage to it."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.views import NUMPY_TYPES
from gemm_tuner.bench.baselines.baseline import CBaseline
from gemm_tuner.bench.c_runner import CRunner
from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.wheels import find_in_wheel, wheel_version
from gemm_tuner.machine.memory import address_of

_WHEEL = "mkl"
_LIBRARY = "libmkl_rt.so.3"
_INSTALL = 'pip install "gemm-tuner[peers]"'
# `mkl_product` of bench/native/mkl.c by the types of x and w, and the type of its results.
_PRODUCTS: dict[tuple[DType, DType], tuple[int, DType]] = {
    (DType.F32, DType.F32): (0, DType.F32),
    (DType.BF16, DType.BF16): (1, DType.F32),
    (DType.U8, DType.S8): (2, DType.S32),
}


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
    )


class Mkl(CBaseline):
    """MKL with packed weights; its results are float32 or integers, whatever the type of y.

    Its threads are chosen by MKL_THREADING_LAYER, which must be set before it is loaded.
    """

    fuses_epilogue = False
    is_of_openmp = True

    def __init__(self, driver: Path) -> None:
        """Find the library; it is loaded when it is needed, because it is visible to all others.

        Raises:
            BaselineMissing: the wheel is not installed.
        """
        self._library = find_in_wheel(_WHEEL, _LIBRARY, install=_INSTALL)
        self._driver = driver
        self.text = f"mkl {wheel_version(_WHEEL, install=_INSTALL)}"

    def prepare(self, workload: Workload) -> "_MklRunner":
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: MKL does not load, or does not multiply such types.
        """
        types = workload.problem.types
        if (types.x, types.w) not in _PRODUCTS:
            raise BaselineMissing(f"MKL does not compute {types.text}; choose another baseline.")
        try:
            ctypes.CDLL(str(self._library), mode=ctypes.RTLD_GLOBAL)
            driver = ctypes.CDLL(str(self._driver))
        except OSError as error:
            raise BaselineMissing(
                f"MKL does not load: {error}; run: pip install --force-reinstall mkl."
            ) from error
        driver.mkl_packed_weight_bytes.restype = ctypes.c_uint64
        return _MklRunner(driver, workload)


class _MklRunner(CRunner):
    def __init__(self, driver: ctypes.CDLL, workload: Workload) -> None:
        problem = workload.problem
        self._driver = driver
        self._w = workload.w
        self._y = workload.y
        product, product_type = _PRODUCTS[problem.types.x, problem.types.w]
        writes_y = problem.types.y is product_type
        self._product = (
            workload.y if writes_y else np.empty(workload.y.shape, NUMPY_TYPES[product_type])
        )
        layer = _LayerStruct(
            workload.rows,
            problem.n,
            problem.k,
            max(1, workload.w.shape[1]),
            problem.w_layout is WeightLayout.NK,
            product,
            address_of(workload.x),
            address_of(self._product),
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

    def sample(
        self, weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        sample = super().sample(weights, warm_up_calls=warm_up_calls, timed_calls=timed_calls)
        if self._product is not self._y:  # that y is right can be seen only there
            self._y[...] = _converted(self._product, self._y.dtype)
        return sample


def _converted(product: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        product = np.clip(product, limits.min, limits.max)
    return product.astype(dtype)
