"""Attention by two products of a library, and one pass over the scores between them."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.weights import StoredWeights
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.epilogue import NO_EPILOGUE
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.finish import TeamStruct, built_finish
from gemm_tuner.libraries.numpy_layer import NumpyLayer
from gemm_tuner.libraries.openmp import OpenMp
from gemm_tuner.machine.memory import ThreadMemory, address_of

Array = NDArray[Any]

_KEPT = 64  # numbers of keys, whose products a library has prepared


class SoftmaxStruct(ctypes.Structure):
    """`softmax_call` of native/softmax.c."""

    _fields_ = (
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("scores", ctypes.c_void_p),
        ("distance", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("add", ctypes.c_void_p),
        ("add_distance", ctypes.c_int64),
        ("behind", ctypes.c_int64),
        ("team", TeamStruct),
    )


class ProductLayer(Protocol):
    """A product computed by a library, whose threads also take what lies between two products.

    `text` is the library's name and version.
    """

    text: str

    @property
    def openmp(self) -> OpenMp:
        """Return the runtime that has the threads."""

    def compute(
        self, x: Array, packed: Array, y: Array, operands: Sequence[Array], threads: int | None
    ) -> None:
        """Write `x @ w` to y, w as it is stored; there are no operands."""


class AttentionLayer:
    """One problem of attention, computed by the layers of two products, with scores in float32.

    `compute` gets the keys where a layer gets w, and the values in front of the operands. Each
    number of keys has products of its own, of which the last ones used are kept.
    """

    def __init__(self, problem: Problem, make: Callable[[Problem], ProductLayer]) -> None:
        """Prepare the products, each by the layer that `make` returns for it.

        Raises:
            BaselineMissing: there is none.
        """
        self._problem = problem

        of_most = tuple(map(make, _products_of(problem, problem.n)))

        @lru_cache(_KEPT)
        def products(keys: int) -> tuple[ProductLayer, ...]:
            if keys == problem.n:
                return of_most
            return tuple(_made(make, one) for one in _products_of(problem, keys))

        self._products = products
        self._memory = ThreadMemory()
        self._hides = any(step.kind.hides for step in problem.epilogue.steps)
        self.text = f"{of_most[0].text} + softmax"

    @property
    def layout(self) -> str:
        """Return the layout of packed weights, of which there are none."""
        return self.text

    def pack(self, weights: StoredWeights) -> Array:
        """Return the keys as they are: nothing is packed ahead."""
        return weights.w

    def compute(
        self, x: Array, packed: Array, y: Array, operands: Sequence[Array], threads: int | None
    ) -> None:
        """Write attention to y; the operands are the values, and then those of the steps."""
        v, *read = operands
        m, n = len(x), len(packed)
        if n == 0:
            y[...] = 0  # of rows that see no key
            return
        of_scores, of_values = self._products(n)
        scores = self._memory.get(m * n * 4)[: m * n * 4].view(np.float32).reshape(m, n)
        of_scores.compute(x, packed, scores, [], threads)
        given = dict(zip(self._names, read, strict=True))
        self._weigh(scores, given, of_scores.openmp, threads)
        of_values.compute(scores, v, y, [], threads)

    @property
    def _names(self) -> list[str]:
        return [operand.name for operand in self._problem.epilogue.operands]

    def _weigh(
        self, scores: Array, read: dict[str, Array], openmp: OpenMp, threads: int | None
    ) -> None:
        """Make weights of scores, in place: in C, or by NumPy where that was not built."""
        m, n = scores.shape
        add = read.get("add")
        if add is not None:
            add = add.astype(np.float32, copy=False)
        scale = float(np.ravel(read["scale"])[0]) if "scale" in read else 1.0
        behind = n - m + 1 if self._hides else n
        library = built_finish()
        if library is not None and (add is None or n < 2 or add.strides[1] == add.itemsize):
            with openmp.in_threads(threads) as usable:
                call = SoftmaxStruct(
                    m,
                    n,
                    address_of(scores),
                    n,
                    scale,
                    None if add is None else address_of(add),
                    0 if add is None else add.strides[0] // add.itemsize,
                    behind,
                    openmp.team(usable or openmp.max_threads()),
                )
                library.softmax_rows(ctypes.byref(call))
            return
        with np.errstate(all="ignore"):
            scores *= np.float32(scale)
            if add is not None:
                scores += add
            if self._hides:
                scores[~np.tri(m, n, behind - 1, dtype=bool)] = -np.inf
            greatest = scores.max(axis=1, initial=-np.inf, keepdims=True)
            scores -= np.where(np.isneginf(greatest), np.float32(0), greatest)
            np.exp(scores, out=scores)
            totals = scores.sum(axis=1, keepdims=True)
            scores /= np.where(totals == 0, np.float32(1), totals)


def _made(make: Callable[[Problem], ProductLayer], problem: Problem) -> ProductLayer:
    """Return the layer of a product, by NumPy where the library does not compute one so small."""
    try:
        return make(problem)
    except BaselineMissing:
        return NumpyLayer(problem)


def _products_of(problem: Problem, keys: int) -> tuple[Problem, Problem]:
    """Return the product of queries with so many keys, and that of the scores with the values."""
    scores = replace(problem.scores, n=keys, epilogue=NO_EPILOGUE)
    types = OperandTypes(x=DType.F32, w=problem.types.w, accumulator=DType.F32, y=problem.types.y)
    values = replace(scores, n=problem.k, k=keys, w_layout=WeightLayout.KN, types=types)
    return scores, values
