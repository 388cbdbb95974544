"""Check NumPy arrays before their addresses are given to a kernel."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import ArrayView
from gemm_tuner.arrays.advice import contiguous, converted, copied
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import Epilogue, OperandShape
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray
from gemm_tuner.machine.memory import address_of


def view_matrix(name: str, array: object, shape: tuple[int, int], dtype: DType) -> ArrayView:
    """Return where a matrix lies, whose rows are contiguous and at any distance.

    Raises:
        InvalidArray: it is no array, or its type, shape or strides cannot be used.
    """
    matrix = _check_array(name, array, shape, dtype)
    rows, columns = shape
    row_stride, column_stride = matrix.strides
    if matrix.size == 0:
        return ArrayView(address_of(matrix), max(1, columns))
    if columns > 1 and column_stride != matrix.itemsize:
        raise InvalidArray(
            f"{name} has elements {column_stride} bytes apart in a row, but they must be "
            f"contiguous ({matrix.itemsize} bytes): pass {contiguous(name, matrix)}."
        )
    if rows == 1:
        return ArrayView(address_of(matrix), max(1, columns))
    row_bytes = columns * matrix.itemsize
    if row_stride < row_bytes or row_stride % matrix.itemsize:
        raise InvalidArray(
            f"{name} has rows {row_stride} bytes apart, but a row of {columns} elements takes "
            f"{row_bytes} bytes: pass {contiguous(name, matrix)}."
        )
    return ArrayView(address_of(matrix), row_stride // matrix.itemsize)


def count_rows(x: object, problem: Problem) -> int:
    """Return the rows of x, one matrix.

    Raises:
        InvalidArray: it is no matrix, or the problem has not so many rows.
    """
    if not isinstance(x, np.ndarray) or x.ndim != 2:
        given = (
            f"has the shape {x.shape}" if isinstance(x, np.ndarray) else f"is a {type(x).__name__}"
        )
        raise InvalidArray(f"x {given}, but an array of two dimensions, (m, k), is needed.")
    return check_rows(len(x), problem)


def check_rows(rows: int, problem: Problem) -> int:
    """Return the number of rows of x.

    Raises:
        InvalidArray: the problem has not so many.
    """
    if rows not in problem.m:
        raise InvalidArray(
            f"{problem.operation.factors[0]} has {rows} rows, but the kernel is made for "
            f"m = {problem.m.text}; ask for a kernel of this size, or of a range of m."
        )
    return rows


def check_columns(name: str, rows: int, problem: Problem) -> int:
    """Return the number of keys, which are the rows of an array, or the columns of the product.

    Raises:
        InvalidArray: the problem has a range of keys, in which so many are not.
    """
    if problem.least_n is None:
        return problem.n
    if rows not in problem.columns:
        raise InvalidArray(
            f"{name} has {rows} keys, but the kernel is made for n = {problem.columns.text}; ask "
            "for a kernel of another range."
        )
    return rows


def view_output(array: object, shape: tuple[int, int], dtype: DType) -> ArrayView:
    """Return where the result goes, an array made by the caller.

    Raises:
        InvalidArray: it cannot be used, or may not be written.
    """
    view = view_matrix("out", array, shape, dtype)
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise InvalidArray("out is read-only, but the result is written to it: pass a copy.")
    return view


def view_operand(
    name: str, value: object, kind: OperandShape, shape: tuple[int, int], dtype: DType
) -> tuple[ArrayView, NDArray[np.generic]]:
    """Return where an epilogue operand lies, and the array that holds it.

    A scalar may be given as a number. `shape` is that of y.

    Raises:
        InvalidArray: the operand cannot be used.
    """
    if kind is OperandShape.SCALAR:
        scalar = _scalar(name, value, dtype)
        return ArrayView(address_of(scalar), 0), scalar
    if kind in {OperandShape.ROW_VECTOR, OperandShape.COLUMN_VECTOR}:
        length = shape[1] if kind is OperandShape.ROW_VECTOR else shape[0]
        vector = _check_array(name, value, (length,), dtype)
        if length > 1 and vector.strides[0] != vector.itemsize:
            raise InvalidArray(
                f"{name} has elements {vector.strides[0]} bytes apart, but they must be "
                f"contiguous ({vector.itemsize} bytes): pass {contiguous(name, vector)}."
            )
        return ArrayView(address_of(vector), 0), vector
    view = view_matrix(name, value, shape, dtype)
    assert isinstance(value, np.ndarray)
    return view, value


def check_operand_names(epilogue: Epilogue, operands: Mapping[str, object]) -> None:
    """Check that the operands given are those that the epilogue reads.

    Raises:
        InvalidArray: one is missing, or is not known.
    """
    names = [operand.name for operand in epilogue.operands]
    if operands.keys() != set(names):
        raise InvalidArray(
            f"the epilogue {epilogue.text} reads {', '.join(names) or 'no operands'}, but got "
            f"{', '.join(operands) or 'none'}: pass each by its name."
        )


def check_overlap(out: NDArray[np.generic], name: str, array: NDArray[np.generic]) -> None:
    """Check that `out` shares no memory with an input.

    Raises:
        InvalidArray: they overlap.
    """
    if not np.may_share_memory(out, array) or not np.shares_memory(out, array):
        return
    raise InvalidArray(
        f"out overlaps {name} in memory, which would be changed while it is read: "
        "pass another array."
    )


def _check_array(
    name: str, array: object, shape: tuple[int, ...], dtype: DType
) -> NDArray[np.generic]:
    wanted = NUMPY_TYPES[dtype]
    if not isinstance(array, np.ndarray):
        raise InvalidArray(
            f"{name} is a {type(array).__name__}, not a numpy.ndarray: pass numpy.asarray({name})."
        )
    if array.dtype != wanted:
        raise InvalidArray(
            f"{name} has the dtype {array.dtype}, but the kernel computes in {wanted.name}: "
            f"pass {converted(name, array, wanted)}."
        )
    if array.shape != shape:
        raise InvalidArray(
            f"{name} has the shape {array.shape}, but {shape} is needed; "
            "check the array, or ask for a kernel of its size."
        )
    if not array.flags.aligned:
        raise InvalidArray(
            f"{name} does not start at a multiple of {array.itemsize} bytes: "
            f"pass {copied(name, array)}."
        )
    return array


def _scalar(name: str, value: object, dtype: DType) -> NDArray[np.generic]:
    if isinstance(value, int | float | np.number):
        return _array_of(name, value, dtype)
    if isinstance(value, np.ndarray) and value.size == 1:
        return np.ascontiguousarray(_check_array(name, value, value.shape, dtype)).reshape(1)
    raise InvalidArray(f"{name} is {value!r}, but one number is needed: pass a float.")


def _array_of(name: str, number: float | np.number[Any], dtype: DType) -> NDArray[np.generic]:
    try:
        array = np.array([number], NUMPY_TYPES[dtype])
    except (OverflowError, ValueError):
        array = None
    if array is None or (dtype.is_integer and array[0] != number):
        raise InvalidArray(
            f"{name} is {number!r}, which is no number of the type {dtype.value}: pass "
            f"{'an integer' if dtype.is_integer else 'a float'}."
        )
    return array
