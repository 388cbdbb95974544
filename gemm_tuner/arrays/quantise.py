"""Quantised weights: made from floats, stored, and turned back into floats.

A weight is `scale * element`, or `scale * (element - zero_point)` where the elements are unsigned.
The elements of one column of w that share a scale are a group. Two elements of 4 bits lie in one
byte, neighbours along a row of w, the first in the lower half.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.dlpack import SharedArray, as_array
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import InvalidArray, InvalidProblem

_TINY = np.float32(2.0**-126)
_WEIGHT_TYPES = (DType.S8, DType.U8, DType.S4, DType.U4)


class QuantisedWeights(NamedTuple):
    """What `Kernel.pack` takes: `kernel.pack(w, scales=scales, zero_points=zero_points)`.

    w: the elements as they are stored, int8 or uint8; two of 4 bits in a byte. scales: (n, groups),
    float32. zero_points: (n, groups), uint8, or None for signed elements. Of weights that others
    have quantised, zero points may lie between the elements: float32.
    """

    w: NDArray[Any]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8 | np.float32] | None


def quantise_weights(
    w: SharedArray, dtype: str, *, group: int | str = 128, w_layout: str = "nk"
) -> QuantisedWeights:
    """Return `w` rounded to integers of `dtype`, each group of `group` weights under its own scale.

    Signed elements use the range that is symmetric around zero; unsigned ones map the least and the
    greatest weight of a group, and zero, which stays exact, into their range.

    Args:
        w: (n, k), or (k, n) with the layout `kn`; any floats, all finite, of NumPy or of any
            library that speaks DLPack.
        dtype: `s8`, `u8`, `s4` or `u4`.
        group: the number of neighbours along k, or `k` for a whole column.
        w_layout: `nk` or `kn`.

    Raises:
        InvalidArray: `w` is not a matrix of finite floats.
        InvalidProblem: `dtype`, `group` or `w_layout` cannot be used.
    """
    given = as_array("w", w)
    if not isinstance(given, np.ndarray) or given.ndim != 2:
        raise InvalidArray("w must be an array of two dimensions, such as a numpy.ndarray.")
    if not np.all(np.isfinite(_as_float(given))):
        raise InvalidArray("w holds NaN or infinity, which no integer stands for; replace them.")
    element = DType.parse(dtype)
    if element not in _WEIGHT_TYPES:
        raise InvalidProblem(
            f"weights cannot be quantised to {dtype!r}; use one of: "
            f"{', '.join(one.value for one in _WEIGHT_TYPES)}."
        )
    n, k = given.shape if w_layout == WeightLayout.NK.value else given.shape[::-1]
    problem = Problem.create(1, n, k, dtype=f"f32_{dtype}", w_layout=f"{w_layout}:g{group}")
    columns = _as_float(given if problem.w_layout is WeightLayout.NK else given.T)

    least, greatest = _ends_of_groups(problem, columns)
    low, high = element_range(element)
    span = np.maximum(greatest, -least) if element.is_signed else greatest - least
    # A group of zeros may have any scale, and subnormal scales would not divide.
    scales = np.maximum(span / np.float32(high), _TINY).astype(np.float32)
    rounded = np.rint(columns / spread_along_k(problem, scales))
    zero_points = None
    if not element.is_signed:
        zero_points = np.clip(np.rint(-least / scales), low, high).astype(np.uint8)
        rounded += spread_along_k(problem, zero_points)
    elements = np.clip(rounded, low, high).astype(np.int16)
    return QuantisedWeights(store_elements(problem, elements), scales, zero_points)


def dequantise_weights(problem: Problem, weights: QuantisedWeights) -> NDArray[np.float64]:
    """Return the numbers that the weights of `problem` stand for, in float64: (n, k)."""
    values: NDArray[np.float64] = read_elements(problem, weights.w).astype(np.float64)
    if weights.zero_points is not None:
        values -= spread_along_k(problem, weights.zero_points)
    values *= spread_along_k(problem, weights.scales)
    return values


def spread_along_k(problem: Problem, of_groups: NDArray[Any]) -> NDArray[Any]:
    """Return the values of groups, repeated for each weight of a group: (n, k)."""
    return np.repeat(of_groups, _group_of(problem), axis=1)[:, : problem.k]


def element_range(dtype: DType) -> tuple[int, int]:
    """Return the least and the greatest element that quantising makes: symmetric if signed."""
    if dtype.is_signed:
        high = 2 ** (dtype.size_bits - 1) - 1
        return -high, high
    return 0, 2**dtype.size_bits - 1


def store_elements(problem: Problem, elements: NDArray[np.int16]) -> NDArray[Any]:
    """Return elements, given as (n, k), as the problem's caller stores them."""
    dtype = problem.types.w
    rows = elements if problem.w_layout is WeightLayout.NK else elements.T
    if dtype.size_bits == 8:
        return np.ascontiguousarray(rows, np.int8 if dtype.is_signed else np.uint8)
    nibbles = np.zeros((len(rows), 2 * dtype.row_bytes(rows.shape[1])), np.uint8)
    nibbles[:, : rows.shape[1]] = rows & 15
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def read_elements(problem: Problem, stored: NDArray[Any]) -> NDArray[np.int16]:
    """Return the elements of weights as the problem's caller stores them: (n, k)."""
    dtype = problem.types.w
    rows = stored.astype(np.int16)
    if dtype.size_bits == 4:
        rows = np.stack((rows & 15, rows >> 4), axis=-1).reshape(len(rows), 2 * rows.shape[1])
        rows = rows[:, : problem.w_shape[1]]
        if dtype.is_signed:
            rows = (rows ^ 8) - 8
    return rows if problem.w_layout is WeightLayout.NK else rows.T


def _ends_of_groups(
    problem: Problem, columns: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the minimum and maximum of each group, zero included: two arrays (n, groups)."""
    least, greatest = np.zeros((2, problem.n, problem.w_groups), np.float32)
    if problem.w_groups:
        starts = np.arange(problem.w_groups) * _group_of(problem)
        np.minimum.reduceat(columns, starts, axis=1, out=least)
        np.maximum.reduceat(columns, starts, axis=1, out=greatest)
    return np.minimum(least, 0), np.maximum(greatest, 0)


def _group_of(problem: Problem) -> int:
    assert problem.w_group is not None
    return problem.w_group


def _as_float(w: NDArray[Any]) -> NDArray[np.float32]:
    return np.asarray(w, dtype=np.float32)
