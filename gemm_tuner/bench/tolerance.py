"""How far a correct kernel may be from the exact result, and where a result is farther."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.domain.dtype import TERMS_IN_F16, DType
from gemm_tuner.domain.problem import Problem

UNIT_ROUNDOFF = 2.0**-24
ULP = 2.0**-23

# A product or sum below the smallest normal number may be flushed to zero. It loses 2^-126, times
# an input of at most 2^6, in each of k terms.
_FLUSHED = 2.0**-120
ROUNDED_SUBNORMAL_F16 = 2.0**-25

# So few elements are compared at once that what is between lies in caches.
_ELEMENTS_AT_ONCE = 1 << 15

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The exact result, and the largest absolute error each element may have: (m, n), float64.

    Where a bound is NaN, anything is right.
    """

    values: Float64Array
    bounds: Float64Array

    @property
    def shape(self) -> tuple[int, int]:
        """Return the rows and columns."""
        rows, columns = self.values.shape
        return rows, columns

    def of_products(self, problem: Problem, products: int) -> "Expected":
        """Return the results of some products, one below the other, as `Inputs.of_products`."""
        return Expected(
            values=results_of_products(self.values, problem, products),
            bounds=results_of_products(self.bounds, problem, products),
        )

    def first_rows(self, rows: int) -> "Expected":
        """Return the first rows, which do not depend on the others."""
        return self.rows(slice(rows))

    def rows(self, some: slice) -> "Expected":
        """Return some of the rows."""
        return Expected(values=self.values[some], bounds=self.bounds[some])


def results_of_products(array: NDArray[Any], problem: Problem, products: int) -> NDArray[Any]:
    """Return the results of some products, one below the other, from that of the first.

    Their inputs lie as `Inputs.of_products` says: weights packed ahead are the same for all; of
    attention, the elements of values move alone.
    """
    if problem.operation.packs_ahead:
        return rotated_rows(array, products)
    if problem.operation.has_values:
        return rolled_columns(array, products)
    if products == 1:
        return array
    return np.concatenate([np.roll(array, (one, one), axis=(0, 1)) for one in range(products)])


def rotated_rows(array: NDArray[Any], products: int) -> NDArray[Any]:
    """Return copies one below the other, each with its rows one further than the last."""
    if products == 1:
        return array
    return np.concatenate([np.roll(array, one, axis=0) for one in range(products)])


def rolled_columns(array: NDArray[Any], products: int) -> NDArray[Any]:
    """Return copies one below the other, each with its columns one further than the last."""
    if products == 1:
        return array
    return np.concatenate([np.roll(array, one, axis=-1) for one in range(products)])


def summation_bound(k: int, accumulator: DType) -> float:
    """Return the largest error of a sum of k products, relative to the sum of their magnitudes.

    The bound is gamma_k = k*u / (1 - k*u), u the unit roundoff of float32, with two roundings more
    for partial sums that are added at the end. It holds for every order of summation. With the
    accumulator f16, each sum of a few products has such an error of its own, u that of float16.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1.
    """
    bound = _gamma(k + 2, UNIT_ROUNDOFF)
    if accumulator is not DType.F16:
        return bound
    partial = _gamma(min(k, TERMS_IN_F16), DType.F16.unit_roundoff)
    return partial + bound + partial * bound


def flush_bound(k: int, accumulator: DType) -> float:
    """Return the largest absolute error of k products because numbers may be subnormal.

    Those of float32 may be flushed to zero; in float16, each sum is rounded to a multiple of 2^-24.
    """
    rounded = ROUNDED_SUBNORMAL_F16 if accumulator is DType.F16 else 0.0
    return (k + 1) * _FLUSHED + k * rounded


def _gamma(roundings: int, unit_roundoff: float) -> float:
    return roundings * unit_roundoff / (1.0 - roundings * unit_roundoff)


def shares_of_bounds(expected: Expected, actual: NDArray[Any]) -> Float64Array:
    """Return the error of each element as a share of its bound: (m, n), above 1 where it is wrong.

    It is infinite where a NaN or an infinity is that should not be, or one is missing.
    """
    with np.errstate(all="ignore"):
        exact = actual.astype(np.float64)
        distance = np.abs(exact - expected.values)
        is_same = (exact == expected.values) | (np.isnan(exact) & np.isnan(expected.values))
        is_free = np.isnan(expected.bounds) | (np.isposinf(expected.bounds) & ~np.isnan(distance))
        shares = np.where(is_same | is_free, 0.0, distance / expected.bounds)
    return np.nan_to_num(shares, nan=np.inf, posinf=np.inf)


def find_error(expected: Expected, actual: NDArray[Any]) -> str | None:
    """Return in words which element of `actual` is farthest out of its bound, None if none is.

    Where the exact result is NaN or infinite, the element must be the same.
    """
    rows, columns = actual.shape
    step = max(1, _ELEMENTS_AT_ONCE // max(1, columns))
    blocks = (slice(first, first + step) for first in range(0, rows, step))
    if not any(_find_wrong(expected.rows(block), actual[block])[0].any() for block in blocks):
        return None
    is_wrong, distance = _find_wrong(expected, actual)
    count = int(np.count_nonzero(is_wrong))
    with np.errstate(invalid="ignore", over="ignore"):
        excess = distance - expected.bounds
    severity = np.where(is_wrong, np.nan_to_num(excess, nan=np.inf, posinf=np.inf), -np.inf)
    row, column = (int(i) for i in np.unravel_index(np.argmax(severity), actual.shape))
    return (
        f"{count} of {actual.size} elements are wrong; y[{row}, {column}] is "
        f"{float(actual[row, column]):.9g}, but {expected.values[row, column]:.9g} "
        f"+- {expected.bounds[row, column]:.2g} is right"
    )


def _find_wrong(expected: Expected, actual: NDArray[Any]) -> tuple[NDArray[np.bool_], Float64Array]:
    """Return which elements are wrong, and how far each is from the exact result."""
    with np.errstate(invalid="ignore", over="ignore"):
        exact = actual.astype(np.float64)
        distance = exact - expected.values
        np.abs(distance, out=distance)
        is_wrong = ~(distance <= expected.bounds) & ~np.isnan(expected.bounds)
        theirs, ours = exact[is_wrong], expected.values[is_wrong]
        is_wrong[is_wrong] = ~((theirs == ours) | (np.isnan(theirs) & np.isnan(ours)))
    return is_wrong, distance
