"""Check weights, with their scales and zero points, before a kernel packs them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import WeightsStruct, make_weights
from gemm_tuner.arrays.advice import contiguous
from gemm_tuner.arrays.dlpack import as_array
from gemm_tuner.arrays.views import view_matrix
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray


class StoredWeights(NamedTuple):
    """The arrays that hold weights, and where they lie; `struct` is valid as long as they live."""

    w: NDArray[Any]
    scales: NDArray[Any] | None
    zero_points: NDArray[Any] | None
    struct: WeightsStruct


def check_weights(
    problem: Problem, w: object, scales: object = None, zero_points: object = None
) -> StoredWeights:
    """Return the weights of `problem`, arrays of NumPy or of whatever speaks DLPack.

    Args:
        problem: says the layout, the type and the groups of w.
        w: (n, k) or (k, n), rows at any distance; with two elements of 4 bits in a byte.
        scales: (n, groups) where the weights are quantised, None elsewhere.
        zero_points: (n, groups) where they are unsigned, None elsewhere; uint8, or float32 where
            they are no elements.

    Raises:
        InvalidArray: an array is missing or not wanted, or its type, shape or strides cannot be
            used.
    """
    elements_per_byte = 8 // min(8, problem.types.w.size_bits)
    rows, columns = problem.w_shape
    shape = (rows, -(-columns // elements_per_byte))
    stored = as_array("w", w)
    if elements_per_byte > 1 and isinstance(stored, np.ndarray) and stored.shape != shape:
        raise InvalidArray(
            f"w has the shape {stored.shape}, but two elements of {problem.types.w.value} lie in a "
            f"byte: {shape} is needed; make it with gemm_tuner.quantise_weights."
        )
    view = view_matrix("w", stored, shape, problem.types.w)
    assert isinstance(stored, np.ndarray)
    scales_array, scales_address = _of_groups(
        "scales", scales, problem, None if problem.w_group is None else DType.F32
    )
    given = as_array("zero_points", zero_points)
    are_floats = isinstance(given, np.ndarray) and given.dtype.kind not in "biu"
    zero_type = DType.F32 if are_floats else DType.U8
    zeros_array, zeros_address = _of_groups(
        "zero_points", given, problem, zero_type if problem.has_zero_points else None
    )
    struct = make_weights(
        view.address,
        view.leading_dimension * elements_per_byte,
        scales=scales_address,
        zero_points=0 if are_floats else zeros_address,
        float_zero_points=zeros_address if are_floats else 0,
    )
    return StoredWeights(stored, scales_array, zeros_array, struct)


def _of_groups(
    name: str, value: object, problem: Problem, dtype: DType | None
) -> tuple[NDArray[Any] | None, int]:
    """Return what each group has and its address; without a type, groups must not have it."""
    if dtype is None:
        if value is not None:
            raise InvalidArray(f"weights of {problem.text!r} have no {name}: leave them out.")
        return None, 0
    shape = (problem.n, problem.w_groups)
    array = as_array(name, value)
    view = view_matrix(name, array, shape, dtype)
    assert isinstance(array, np.ndarray)
    if shape[0] > 1 and view.leading_dimension != max(1, shape[1]):
        raise InvalidArray(
            f"{name} has rows {view.leading_dimension} elements apart, but must be dense: "
            f"pass {contiguous(name, array)}."
        )
    return array, view.address
