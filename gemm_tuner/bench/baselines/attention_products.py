"""Attention by two products of a library, and a pass in C between them."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.baselines.attention_terms import check_float32
from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Package, Row
from gemm_tuner.bench.baselines.mkl import START_S, find_mkl, mkl_packages, mkl_text
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.attention_layer import AttentionLayer, ProductLayer
from gemm_tuner.libraries.onednn import installed_onednn
from gemm_tuner.libraries.onednn_layer import OneDnnLayer
from gemm_tuner.libraries.openblas_layer import OpenBlasLayer
from gemm_tuner.libraries.openmp import OpenMp, system_openmp
from gemm_tuner.machine.memory import address_of

# Numbers of MKL and of CBLAS.
_SEQUENTIAL, _GNU = 1, 3
_INTEGERS_OF_32_BITS = 0
_ROW_MAJOR, _AS_STORED, _TRANSPOSED = 101, 111, 112


class _Composed(AnyBaseline):
    """Two products of a library, with one pass in C over the scores between them."""

    fuses_epilogue = True
    is_of_openmp = True
    implementation = "two products and a softmax in C, called from Python"

    def __init__(
        self, package: str, make: Callable[[Problem, int], ProductLayer], *, only_f32: str = ""
    ) -> None:
        """Remember what makes products; `only_f32` names a library that has those of f32 alone."""
        self.text = package
        self._make = make
        self._only_f32 = only_f32

    def check_problem(self, problem: Problem) -> None:
        """Refuse types that the library has no products of.

        Raises:
            BaselineMissing: it has those of float32 alone.
        """
        if self._only_f32:
            check_float32(self._only_f32, problem)

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: the library does not load, or does not compute these products.
        """
        threads = system_openmp().at_most(workload.threads)
        layer = AttentionLayer(workload.problem, lambda product: self._make(product, threads))
        self.text = layer.text
        assert workload.v is not None
        read = [workload.v, *workload.operands.values()]

        def make_call(w: NDArray[Any]) -> Callable[[], object]:
            return partial(layer.compute, workload.x, w, workload.y, read, threads)

        return PythonRunner(workload, make_call)


class _MklProduct:
    """A product of MKL in float32."""

    def __init__(self, problem: Problem, threads: int) -> None:
        """Load the library.

        Raises:
            BaselineMissing: it is not installed, or does not load.
        """
        try:
            library = ctypes.CDLL(str(find_mkl()))
        except OSError as error:
            raise BaselineMissing(
                f"MKL does not load: {error}; run: pip install --force-reinstall mkl."
            ) from error
        library.MKL_Set_Interface_Layer(_INTEGERS_OF_32_BITS)
        library.MKL_Set_Threading_Layer(_SEQUENTIAL if threads == 1 else _GNU)
        self.text = mkl_text()
        self.openmp: OpenMp = system_openmp()
        self._is_nk = problem.w_layout is WeightLayout.NK
        self._multiply = library.cblas_sgemm
        integer, number, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
        self._multiply.argtypes = (
            *(integer,) * 6,
            number,
            pointer,
            integer,
            pointer,
            integer,
            number,
            pointer,
            integer,
        )
        self._multiply.restype = None

    def compute(
        self,
        x: NDArray[Any],
        packed: NDArray[Any],
        y: NDArray[Any],
        operands: Sequence[NDArray[Any]],  # noqa: ARG002 - a product has none
        threads: int | None,
    ) -> None:
        """Write `x @ w` to y."""
        (m, k), n = x.shape, y.shape[1]
        layout = _TRANSPOSED if self._is_nk else _AS_STORED
        with self.openmp.in_threads(threads):
            self._multiply(
                *(_ROW_MAJOR, _AS_STORED, layout, m, n, k),
                *(1.0, address_of(x), k, address_of(packed), packed.shape[1]),
                *(0.0, address_of(y), n),
            )


def _of_onednn(_materials: object) -> list[Copy]:
    return [
        Copy(
            package=one.package,
            baseline=_Composed(
                one.package,
                partial(
                    lambda path, problem, threads: OneDnnLayer(problem, threads, path), one.path
                ),
            ),
            start_s=one.start_s,
        )
        for one in installed_onednn()
    ]


def _of_openblas(_materials: object) -> list[Copy]:
    package = _packages_of_openblas()[0].text
    baseline = _Composed(package, lambda problem, _threads: OpenBlasLayer(problem))
    return [Copy(package=package, baseline=baseline)]


def _packages_of_openblas() -> list[Package]:
    return [Package(f"numpy {np.__version__}")]


def _of_mkl(_materials: object) -> list[Copy]:
    package = mkl_text()
    baseline = _Composed(package, _MklProduct, only_f32="MKL")
    return [Copy(package=package, baseline=baseline, start_s=START_S)]


ROWS = tuple(
    Row(
        name=name,
        place=place,
        find=find,
        installed=installed,
        is_raced=is_raced,
        takes_activations=True,
        attends=True,
        attention_alone=True,
        is_usual=False,
    )
    # MKL takes about as long as OpenBLAS, and nothing runs its products instead of a kernel.
    for name, place, find, installed, is_raced in (
        (
            "onednn-attention",
            20,
            _of_onednn,
            lambda: [Package(one.package, one.start_s) for one in installed_onednn()],
            True,
        ),
        ("openblas-attention", 21, _of_openblas, _packages_of_openblas, True),
        ("mkl-attention", 22, _of_mkl, mkl_packages, False),
    )
)
