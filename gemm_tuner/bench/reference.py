"""The result of a problem in float64, with the error that its types allow."""

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.inputs import Inputs
from gemm_tuner.bench.tolerance import (
    ULP,
    UNIT_ROUNDOFF,
    Expected,
    flush_bound,
    summation_bound,
)
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem, WeightLayout
from gemm_tuner.runtime.arrays import NUMPY_TYPES

_EXACT_IN_FLOAT = 2.0**24


def compute_expected(problem: Problem, inputs: Inputs) -> Expected:
    """Return `epilogue(x @ w)` in float64 with its error bounds.

    The error of the product is passed through the chain: each step widens it by its own slope and
    adds its own rounding, as its row in the table of steps says.
    """
    x = inputs.x.astype(np.float64)
    w = inputs.w.astype(np.float64)
    w = w.T if problem.w_layout is WeightLayout.NK else w
    with np.errstate(all="ignore"):
        values = x @ w
        bounds = np.zeros(values.shape)
        if not problem.types.accumulator.is_integer:
            bounds += flush_bound(problem.k)
        if not inputs.product_is_exact:
            bounds += summation_bound(problem.k) * (np.abs(x) @ np.abs(w))
        product = Expected(values=values, bounds=bounds)
        finished = _apply_epilogue(problem, inputs, product, sums_of_w=w.sum(axis=0))
        return _round_to_y(problem, finished)


def _apply_epilogue(
    problem: Problem, inputs: Inputs, product: Expected, *, sums_of_w: NDArray[np.float64]
) -> Expected:
    values, bounds = product.values, _only_finite(product.values, product.bounds)
    operands = iter(inputs.operands.values())
    is_integer = problem.types.accumulator.is_integer
    for step in problem.epilogue.steps:
        kind = step.kind
        operand: NDArray[np.float64] | None = None
        if kind.operand is not OperandShape.NONE:
            operand = next(operands).astype(np.float64)
            if kind.operand is OperandShape.COLUMN_VECTOR:
                operand = operand[:, np.newaxis]
        if kind.is_offset and operand is not None:  # of integers: exact
            values = kind.reference(np, values, operand * sums_of_w)
            continue
        if is_integer:
            bounds = _bounds_as_floats(values)
            is_integer = False
        bounds = kind.error(np, bounds, values, operand)
        values = kind.reference(np, values, operand, *step.parameters)
        own_error = kind.ulp * ULP * np.abs(values) + kind.absolute + flush_bound(0)
        bounds = bounds + own_error
        bounds = _only_finite(values, bounds)
    if is_integer and not problem.types.y.is_integer:
        bounds = _bounds_as_floats(values)
    return Expected(values=values, bounds=bounds)


def _round_to_y(problem: Problem, finished: Expected) -> Expected:
    """Return the result with the error of rounding it to the type of y."""
    if problem.types.y is problem.types.accumulator:
        return finished
    if problem.types.y.is_integer:
        return _round_to_bytes(problem, finished)
    largest = np.abs(finished.values) + finished.bounds
    rounding = problem.types.y.unit_roundoff * largest
    bounds = _only_finite(finished.values, finished.bounds + rounding)
    return Expected(values=finished.values, bounds=bounds)


def _bounds_as_floats(integers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the error of turning sums of integers into float32."""
    return np.where(np.abs(integers) > _EXACT_IN_FLOAT, UNIT_ROUNDOFF * np.abs(integers), 0.0)


def _round_to_bytes(problem: Problem, finished: Expected) -> Expected:
    """Return the result rounded to even and saturated; an error may move it past a tie."""
    limits = np.iinfo(NUMPY_TYPES[problem.types.y])
    values = np.where(np.isnan(finished.values), limits.min, finished.values)
    least = np.clip(np.rint(values - finished.bounds), limits.min, limits.max)
    greatest = np.clip(np.rint(values + finished.bounds), limits.min, limits.max)
    return Expected(values=(least + greatest) / 2, bounds=(greatest - least) / 2)


def _only_finite(values: NDArray[np.float64], bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    # NaN and infinities are exact: their bound must not spread to what is computed from them.
    return np.where(np.isfinite(values), bounds, 0.0)
