"""A linear layer computed by NumPy, in float32 or, of integers, in float64, which is exact."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.quantise import QuantisedWeights, dequantise_weights
from gemm_tuner.arrays.weights import StoredWeights
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.libraries.openmp import OpenMp, system_openmp

# Elements of the problem's types; NumPy's own types do not include bfloat16.
Array = NDArray[Any]


class NumpyLayer:
    """One problem, computed by NumPy in as many threads as it chooses."""

    text = f"numpy {np.__version__}"

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.openmp: OpenMp = system_openmp()

    @property
    def layout(self) -> str:
        """Return how the weights are packed."""
        return self.text

    def pack(self, weights: StoredWeights) -> Array:
        """Return a copy of the weights, (k, n), in the type in which they are multiplied."""
        working_type = _working_type(self._problem)
        if weights.scales is not None:
            quantised = QuantisedWeights(weights.w, weights.scales, weights.zero_points)
            return dequantise_weights(self._problem, quantised).astype(working_type).T
        return self._multiplied(np.array(weights.w, order="C"))

    def _multiplied(self, w: Array) -> Array:
        """Return w, (k, n), in the type in which it is multiplied."""
        wanted: Array = w.astype(_working_type(self._problem), copy=False)
        return wanted.T if self._problem.w_layout is WeightLayout.NK else wanted

    def compute(
        self,
        x: Array,
        packed: Array,
        y: Array,
        operands: Sequence[Array],
        threads: int | None,  # noqa: ARG002 - NumPy chooses its threads itself
    ) -> None:
        """Write `epilogue(x @ w)` to y; the operands are in the order of the epilogue."""
        if not self._problem.operation.packs_ahead:
            packed = self._multiplied(packed)
        # A kernel computes with infinities in silence, and so does its substitute.
        with np.errstate(all="ignore"):
            product = np.matmul(x.astype(packed.dtype, copy=False), packed)
        sums_of_w = packed.sum(axis=0) if takes_offset(self._problem) else None
        y[...] = finish(self._problem, product, sums_of_w, operands)


def takes_offset(problem: Problem) -> bool:
    """Say whether the epilogue takes an offset off x, for which the sums of w are needed."""
    return any(step.kind.is_offset for step in problem.epilogue.steps)


def finish(
    problem: Problem,
    product: Array,
    sums_of_w: Array | None,
    operands: Sequence[Array],
    first_step: int = 0,
) -> Array:
    """Return the epilogue of a product, from a step on, in the type of y.

    `operands` are those of these steps. `sums_of_w` are those of each column of w, (n,), for
    epilogues that take an offset off x.
    """
    value = product.astype(_working_type(problem), copy=False)
    remaining = iter(operands)
    with np.errstate(all="ignore"):
        for step in problem.epilogue.steps[first_step:]:
            kind = step.kind
            operand: Array | None = None
            if kind.operand is not OperandShape.NONE:
                operand = next(remaining).astype(value.dtype, copy=False)
                if kind.operand is OperandShape.COLUMN_VECTOR:
                    operand = operand[:, np.newaxis]
                if kind.is_offset:
                    operand = operand * sums_of_w
            compute: Callable[..., Array] = kind.whole_arrays or kind.reference
            value = np.asarray(compute(np, value, operand, *step.parameters), dtype=value.dtype)
        return rounded(value, problem.types.y)


def _working_type(problem: Problem) -> type[np.float32 | np.float64]:
    # Sums of integers are exact in float64.
    return np.float64 if problem.types.x.is_integer else np.float32


def rounded(value: Array, dtype: DType) -> Array:
    """Return a result in its type: integers are rounded to even and saturated, NaN is the least."""
    wanted = NUMPY_TYPES[dtype]
    if not dtype.is_integer:
        return value.astype(wanted, copy=False)
    limits = np.iinfo(wanted)
    finite = np.where(np.isnan(value), limits.min, value)
    return np.clip(np.rint(finite), limits.min, limits.max).astype(wanted)
