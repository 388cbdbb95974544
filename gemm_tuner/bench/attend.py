"""The softmax of scores and its product with values, in float64, with the error of float32."""

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.inputs import Inputs
from gemm_tuner.bench.tolerance import (
    ROUNDED_SUBNORMAL_F16,
    ULP,
    UNIT_ROUNDOFF,
    Expected,
    flush_bound,
    summation_bound,
)
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem

# Of e^x as kernels compute it, relative: twice what four million numbers gave. Below e^-87 it is 0.
EXPONENTIAL_ERROR = 2e-7
_LEAST_WEIGHT = 2e-38
# Weights from here on are numbers above zero, whatever a kernel takes off scores before the
# exponential, in the type that they are rounded to.
_SAFE_WEIGHT = 1e-30
_SAFE_WEIGHT_F16 = 2.0**-23


def attend(problem: Problem, inputs: Inputs, scores: Expected) -> Expected:
    """Return `softmax(scores) @ v`, where hidden keys have no weight, with its error bounds.

    A weight is off by what its score is off, as a power of e; by the rounding of the distance to
    the greatest score, in as many steps as there are maxima on the way; and by the exponential. A
    row whose scores are all minus infinity gives zeros. Where a value that is no number has a
    weight that may be zero, anything is right.
    """
    assert inputs.v is not None
    v = inputs.v.astype(np.float64)
    values, bounds = scores.values, scores.bounds
    with np.errstate(all="ignore"):
        for step in problem.epilogue.steps:
            if step.kind.hides:
                values = step.kind.reference(np, values, None)
        is_hidden = np.isneginf(values)
        greatest = values.max(axis=1, initial=-np.inf, keepdims=True)
        distances = values - np.where(np.isneginf(greatest), 0.0, greatest)
        weights = np.exp(distances)
        errors = _errors_of_weights(weights, distances, bounds, is_hidden)
        added = summation_bound(2 * problem.n + 8, DType.F32)
        sums = weights.sum(axis=1, keepdims=True)
        errors_of_sums = errors.sum(axis=1, keepdims=True) + added * sums
        y = weights @ v / sums
        rounding = problem.types.x.unit_roundoff if problem.types.x is not DType.F32 else 0.0
        if problem.types.x is DType.F16:
            errors = np.where(weights > 0, errors + ROUNDED_SUBNORMAL_F16, errors)
        of_products = (errors + (added + rounding) * weights) @ np.abs(v)
        of_products += flush_bound(problem.n, DType.F32)
        least_sums = sums - errors_of_sums
        off = (of_products + np.abs(y) * errors_of_sums) / least_sums + 2 * ULP * np.abs(y)
        off = np.where(least_sums > 0, off, np.inf)
        is_free = np.isnan(np.where(is_hidden, 0.0, bounds)).any(axis=1, keepdims=True)
        is_free = is_free | _may_be_left_out(v, weights, _safe_weight(problem))
    is_zero = is_hidden.all(axis=1, keepdims=True)
    y = np.where(is_zero, 0.0, y)
    off = np.where(is_zero | ~np.isfinite(y), 0.0, off)
    return Expected(values=y, bounds=np.where(is_free, np.nan, off))


def _errors_of_weights(
    weights: NDArray[np.float64],
    distances: NDArray[np.float64],
    bounds: NDArray[np.float64],
    is_hidden: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return by how much a weight may be off: nothing where its key is hidden."""
    # A maximum that moves costs an exponential and a product: as much as a few additions.
    relative = bounds + 2 * UNIT_ROUNDOFF * np.abs(distances) + EXPONENTIAL_ERROR
    errors = weights * np.expm1(relative) + _LEAST_WEIGHT
    nothing: NDArray[np.float64] = np.where(is_hidden, 0.0, errors)
    return nothing


def _safe_weight(problem: Problem) -> float:
    return _SAFE_WEIGHT_F16 if problem.types.x is DType.F16 else _SAFE_WEIGHT


def _may_be_left_out(
    v: NDArray[np.float64], weights: NDArray[np.float64], safe_weight: float
) -> NDArray[np.bool_]:
    """Return where a value that is no number may meet a weight of zero, or no weight."""
    is_odd = ~np.isfinite(v)
    is_slight = ~(weights >= safe_weight) & ~np.isnan(weights)
    left_out: NDArray[np.bool_] = (is_slight.astype(np.float32) @ is_odd.astype(np.float32)) > 0
    return left_out
