"""Check the arrays of one call, of a kernel or of what computes in its place."""

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import ArrayView
from gemm_tuner.arrays.batch import batch_of, check_batch_shapes
from gemm_tuner.arrays.dlpack import AnyArray, as_array, new_result
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.views import (
    check_operand_names,
    check_overlap,
    count_rows,
    view_matrix,
    view_operand,
    view_output,
)
from gemm_tuner.domain.problem import Problem


class CallOperands(NamedTuple):
    """What the epilogue reads: where it lies, in the order of the steps, and arrays by name."""

    views: list[ArrayView]
    arrays: dict[str, NDArray[Any]]


class CallArrays(NamedTuple, Generic[AnyArray]):
    """The arrays of a call and where they lie; `result` is y as its caller knows it."""

    x: NDArray[Any]
    x_view: ArrayView
    y: NDArray[Any]
    y_view: ArrayView
    operands: CallOperands
    result: AnyArray


class BatchArrays(NamedTuple, Generic[AnyArray]):
    """x and y of a batch, three dimensions each; `result` is y as its caller knows it."""

    x: NDArray[Any]
    y: NDArray[Any]
    result: AnyArray


def check_call(
    problem: Problem, x: AnyArray, out: AnyArray | None, operands: Mapping[str, object]
) -> CallArrays[AnyArray]:
    """Return the arrays of a call, with a new one for the result if `out` is None.

    Args:
        problem: says the types and sizes.
        x: (m, k), rows at any distance.
        out: (m, n), which shares no memory with an input.
        operands: what the epilogue reads, by name.

    Raises:
        InvalidArray: an array is missing, or its type, shape or strides cannot be used.
    """
    given = as_array("x", x)
    rows = count_rows(given, problem)
    types, shape = problem.types, (rows, problem.n)
    x_view = view_matrix("x", given, (rows, problem.k), types.x)
    result = new_result(x, shape, NUMPY_TYPES[types.y]) if out is None else out
    y = as_array("out", result)
    y_view = view_output(y, shape, types.y)
    read = view_operands(problem, operands, shape)
    assert isinstance(given, np.ndarray)
    assert isinstance(y, np.ndarray)
    if out is not None:
        for name, array in {"x": given, **read.arrays}.items():
            check_overlap(y, name, array)
    return CallArrays(given, x_view, y, y_view, read, result)


def view_operands(
    problem: Problem, operands: Mapping[str, object], shape: tuple[int, int]
) -> CallOperands:
    """Return what the epilogue of a problem reads; `shape` is that of y.

    Raises:
        InvalidArray: an operand is missing or not known, or cannot be used.
    """
    check_operand_names(problem.epilogue, operands)
    views, arrays = [], {}
    for operand in problem.epilogue.operands:
        view, array = view_operand(
            operand.name,
            as_array(operand.name, operands[operand.name]),
            operand.shape,
            shape,
            problem.operand_type(operand),
        )
        views.append(view)
        arrays[operand.name] = array
    return CallOperands(views, arrays)


def check_batch_call(problem: Problem, x: AnyArray, out: AnyArray | None) -> BatchArrays[AnyArray]:
    """Return x and y of a batch, with a new y if `out` is None.

    Raises:
        InvalidArray: one has not three dimensions, or its shape is not that of the problem.
    """
    given = batch_of("x", x, "(batch, m, k)")
    shape = (*given.shape[:2], problem.n)
    result = new_result(x, shape, NUMPY_TYPES[problem.types.y]) if out is None else out
    y = batch_of("out", result, f"of the shape {shape}")
    check_batch_shapes(given, y, problem)
    return BatchArrays(given, y, result)
