"""The result of a problem in float64, with the error that its types allow."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.quantise import (
    QuantisedWeights,
    dequantise_weights,
    read_elements,
    spread_along_k,
)
from gemm_tuner.bench.attend import attend
from gemm_tuner.bench.inputs import Inputs
from gemm_tuner.bench.tolerance import (
    ULP,
    UNIT_ROUNDOFF,
    Expected,
    flush_bound,
    summation_bound,
)
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.epilogue import OperandShape, StepKind
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout

_EXACT_IN_FLOAT = 2.0**24
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_OF_W_AT_ONCE = 2**19  # elements: 4 MiB in float64
_OF_X_AT_ONCE = 2**23
# However long they are: a product of fewer would read the other operand for each.
_LEAST_ROWS, _LEAST_COLUMNS = 64, 16
# A group of d elements makes d roundings; then come zero_point * scale, its product with the sum of
# x, the scaling, the subtraction, and one addition for each group: with g groups at most d + 4 + g,
# where d + g is at most k + 1.
_ROUNDINGS_OF_GROUPS = 5


def compute_expected(problem: Problem, inputs: Inputs) -> Expected:
    """Return `epilogue(x @ w)` in float64 with its error bounds.

    The error of the product is passed through the chain: each step widens it by its own slope and
    adds its own rounding, as its row in the table of steps says. Where numbers may become larger
    than float32 has, anything is right.
    """
    if problem.operation.has_values:
        scores = compute_expected(problem.scores, inputs)
        return round_to_y(attend(problem, inputs, scores), problem.types)
    accumulator = problem.types.accumulator
    needs_bounds = not inputs.product_is_exact
    terms = problem.k + (0 if inputs.scales is None else _ROUNDINGS_OF_GROUPS)
    m = len(inputs.x)
    values, bounds = np.empty((m, problem.n)), np.zeros((m, problem.n))
    sums_of_w = np.empty(problem.n)
    with np.errstate(all="ignore"):
        for rows in _blocks(m, problem.k, elements=_OF_X_AT_ONCE, least=_LEAST_ROWS):
            x = inputs.x[rows].astype(np.float64)
            magnitudes_of_x = np.abs(x) if needs_bounds else x
            for columns in _blocks_of_columns(problem):
                w = _numbers_of_w(problem, inputs, columns)
                values[rows, columns] = x @ w
                sums_of_w[columns] = w.sum(axis=0)
                if needs_bounds:
                    magnitudes = _magnitudes_of_w(problem, inputs, w)
                    bounds[rows, columns] = magnitudes_of_x @ magnitudes
        may_overflow = np.isfinite(bounds) & (bounds > _LARGEST_FLOAT)
        if needs_bounds:
            bounds *= summation_bound(terms, accumulator)
        if not accumulator.is_integer:
            bounds += flush_bound(problem.k, accumulator)
        product = Expected(values=values, bounds=bounds)
        finished = _apply_epilogue(
            problem, inputs, product, sums_of_w=sums_of_w, may_overflow=may_overflow
        )
    return round_to_y(finished, problem.types)


def _blocks_of_columns(problem: Problem) -> Iterator[slice]:
    """Yield blocks of columns of w whose float64 stay in caches; quantised weights are one."""
    least = problem.n if problem.types.is_weight_only else _LEAST_COLUMNS
    return _blocks(problem.n, problem.k, elements=_OF_W_AT_ONCE, least=least)


def _blocks(count: int, k: int, *, elements: int, least: int) -> Iterator[slice]:
    """Yield blocks of rows or columns of k elements, of at least so many, whatever they hold."""
    step = max(1, least, elements // max(1, k))
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def _numbers_of_w(problem: Problem, inputs: Inputs, columns: slice) -> NDArray[np.float64]:
    """Return columns of w, (k, columns); of quantised weights all."""
    if inputs.scales is not None:
        weights = QuantisedWeights(inputs.w, inputs.scales, inputs.zero_points)
        return dequantise_weights(problem, weights).T
    if problem.w_layout is WeightLayout.NK:
        of_columns: NDArray[np.float64] = inputs.w[columns].T.astype(np.float64, order="K")
    else:
        of_columns = inputs.w[:, columns].astype(np.float64)
    return of_columns


def _magnitudes_of_w(
    problem: Problem, inputs: Inputs, w: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the magnitudes that sums of the columns `w` pass through, as (k, columns).

    Quantised weights enter as `scale * (sum of x * element - zero_point * sum of x)`, for each
    group: the sums pass through the magnitudes of both terms. The kernel takes half the range off
    elements and zero points first, and so may the bound.
    """
    if inputs.scales is None or inputs.zero_points is None:
        return np.abs(w)
    middle = 2 ** (problem.types.w.size_bits - 1)
    of_elements = np.abs(read_elements(problem, inputs.w).astype(np.float64) - middle)
    of_zero_points = np.abs(inputs.zero_points.astype(np.float64) - middle)
    of_sums = of_elements + spread_along_k(problem, of_zero_points)
    magnitudes: NDArray[np.float64] = of_sums * spread_along_k(problem, inputs.scales)
    return magnitudes.T


def _apply_epilogue(
    problem: Problem,
    inputs: Inputs,
    product: Expected,
    *,
    sums_of_w: NDArray[np.float64],
    may_overflow: NDArray[np.bool_],
) -> Expected:
    values, bounds = product.values, _only_finite(product.values, product.bounds)
    is_unknown = may_overflow
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
        if operand is not None and np.isinf(operand).any():
            is_unknown |= _makes_anything(kind, values, bounds, operand)
        bounds = kind.error(np, bounds, values, operand, *step.parameters)
        values = kind.reference(np, values, operand, *step.parameters)
        own_error = kind.ulp * ULP * np.abs(values) + kind.absolute + flush_bound(0, DType.F32)
        bounds = bounds + own_error
        is_unknown |= np.isfinite(values) & (np.abs(values) + bounds > _LARGEST_FLOAT)
        bounds = _only_finite(values, bounds)
    if is_integer and not problem.types.y.is_integer:
        bounds = _bounds_as_floats(values)
    return Expected(values=values, bounds=np.where(is_unknown, np.nan, bounds))


def _makes_anything(
    kind: StepKind,
    values: NDArray[np.float64],
    bounds: NDArray[np.float64],
    operand: NDArray[np.float64],
) -> NDArray[np.bool_]:
    """Return where an infinite operand makes another result of each value that may be computed.

    A kernel may compute zero for a small number, such as `gelu_erf` of -6, whose product with
    infinity may then be an infinity or NaN. An exact zero makes NaN; a number that was rounded to
    zero, and might have become one, may make either.
    """
    least = kind.reference(np, values - bounds, operand)
    greatest = kind.reference(np, values + bounds, operand)
    is_same = (least == greatest) | (np.isnan(least) & np.isnan(greatest))
    differs: NDArray[np.bool_] = np.isinf(operand) & ~is_same & ((values != 0) | (bounds >= 1))
    return differs


def round_to_y(finished: Expected, types: OperandTypes) -> Expected:
    """Return the result with the error of rounding it to the type of y.

    Where an error decides whether it overflows, any number is right.
    """
    if types.y_holds_sums:
        return finished
    # Rounding keeps the order: results lie between the rounded ends of the range.
    with np.errstate(invalid="ignore", over="ignore"):
        least = _rounded(finished.values - finished.bounds, types.y)
        greatest = _rounded(finished.values + finished.bounds, types.y)
        values, bounds = (least + greatest) / 2, (greatest - least) / 2
    may_overflow = np.isfinite(least) != np.isfinite(greatest)
    values = np.where(may_overflow, np.where(np.isfinite(least), least, greatest), values)
    bounds = _only_finite(values, np.where(may_overflow, np.inf, bounds))
    return Expected(
        values=values, bounds=np.where(np.isnan(finished.bounds), finished.bounds, bounds)
    )


def _bounds_as_floats(integers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the error of turning sums of integers into float32."""
    return np.where(np.abs(integers) > _EXACT_IN_FLOAT, UNIT_ROUNDOFF * np.abs(integers), 0.0)


def _rounded(values: NDArray[np.float64], y: DType) -> NDArray[np.float64]:
    """Return floats in the type of y, rounded to even; integers are saturated, NaN is the least."""
    wanted = NUMPY_TYPES[y]
    if not y.is_integer:
        return values.astype(np.float32).astype(wanted).astype(np.float64)
    limits = np.iinfo(wanted)
    numbers = np.where(np.isnan(values), limits.min, values)
    return np.clip(np.rint(numbers), limits.min, limits.max)


def _only_finite(values: NDArray[np.float64], bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    # NaN and infinities are exact: their bound must not spread to later steps.
    return np.where(np.isfinite(values), bounds, 0.0)
