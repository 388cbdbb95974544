"""Check the arrays of a call that multiplies two activations, of one product or of many."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import ArrayView
from gemm_tuner.arrays.advice import contiguous
from gemm_tuner.arrays.batch import OPERAND_DIMENSIONS
from gemm_tuner.arrays.call import CallOperands
from gemm_tuner.arrays.dlpack import AnyArray, as_array, new_result
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.views import (
    check_columns,
    check_operand_names,
    check_overlap,
    check_rows,
    view_matrix,
    view_operand,
    view_output,
)
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import EpilogueOperand
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import InvalidArray, InvalidSetting

Array = NDArray[Any]
_Shape = tuple[int, ...]

_BATCH_AND_HEADS = 2
_MOST_DIMENSIONS = _BATCH_AND_HEADS + 2
_NOWHERE = ArrayView(0, 0)


class Products(NamedTuple, Generic[AnyArray]):
    """The arrays of a call as they were given, and where those of its products lie.

    `front` is what y has in front of its last two dimensions: nothing, (batch,) or (batch, heads).
    `result` is y as its caller knows it. There are no views where there is no product. `columns`
    are those of x times w.
    """

    front: _Shape
    rows: int
    columns: int
    x: Array
    w: Array
    y: Array
    x_view: ArrayView
    w_view: ArrayView
    y_view: ArrayView
    operands: CallOperands
    result: AnyArray
    v: Array | None = None
    v_view: ArrayView | None = None

    @property
    def batch(self) -> int:
        """Return how many items there are, each of as many heads."""
        return self.front[0] if self.front else 1

    @property
    def heads(self) -> int:
        """Return how many heads each item has."""
        return self.front[1] if len(self.front) == _BATCH_AND_HEADS else 1

    def each(self, operands: Sequence[EpilogueOperand]) -> Iterator[tuple[Array, ...]]:
        """Yield x, w, y, v where there is one, and the operands, of one product after the other."""
        values = () if self.v is None else (self.v,)
        arrays = (self.x, self.w, self.y, *values, *self.operands.arrays.values())
        if not self.front:
            yield arrays
            return
        own = [
            2,
            2,
            2,
            *(2 for _one in values),
            *(OPERAND_DIMENSIONS[operand.shape] for operand in operands),
        ]
        spread = [
            np.broadcast_to(array, (*self.front, *array.shape[array.ndim - dimensions :]))
            if array is not self.y
            else array  # which must stay writeable
            for array, dimensions in zip(arrays, own, strict=True)
        ]
        for place in np.ndindex(self.front):
            yield tuple(array[place] for array in spread)


def check_products(
    problem: Problem,
    x: AnyArray,
    w: object,
    out: AnyArray | None,
    operands: Mapping[str, object],
    *,
    v: object = None,
) -> Products[AnyArray]:
    """Return the arrays of a call, with a new one for the results if `out` is None.

    Args:
        problem: says the types and sizes.
        x: (m, k), (batch, m, k) or (batch, heads, m, k), the last dimension dense.
        w: as the problem's layout says in its last two dimensions, and in front of them as x. What
            is missing or 1 there is the same for all.
        out: (m, n) behind what x and w have in front, which shares no memory with an input.
        operands: what the epilogue reads, by name; each as for one product, shared by all, or with
            batch and heads in front.
        v: of attention, the values (n, k), in front of them as x. Nothing else has them.

    Raises:
        InvalidArray: an array is missing, or its type, shape or strides cannot be used.
    """
    types = problem.types
    names = problem.operation.factors
    given_x = _array_of(names[0], x, "(m, k)")
    given_w = _array_of(names[1], w, "(n, k)" if problem.w_layout is WeightLayout.NK else "(k, n)")
    rows = check_rows(given_x.shape[-2], problem)
    columns = check_columns(names[1], given_w.shape[-2], problem)
    w_shape = problem.with_columns(columns).w_shape
    front = _front_of(names, given_x, given_w)
    given_v = _values_of(problem, v, front)
    wanted = (*front, rows, problem.y_columns)
    result = new_result(x, wanted, NUMPY_TYPES[types.y]) if out is None else out
    given_y = _array_of("out", result, "(m, k)" if problem.operation.has_values else "(m, n)")
    if given_y.shape != wanted:
        raise InvalidArray(
            f"out has the shape {given_y.shape}, but {wanted} is needed: pass another array."
        )
    check_operand_names(problem.epilogue, operands)
    x_view = _view(names[0], given_x, front, (rows, problem.k), types.x)
    w_view = _view(names[1], given_w, front, w_shape, types.w)
    y_view = _view("out", given_y, front, (rows, problem.y_columns), types.y)
    v_view = None if given_v is None else _view("v", given_v, front, w_shape, types.w)
    read = _operands_of(problem, operands, front, (rows, columns))
    if out is not None:
        _check_apart(given_y)
        values = {} if given_v is None else {"v": given_v}
        for name, array in {names[0]: given_x, names[1]: given_w, **values, **read.arrays}.items():
            check_overlap(given_y, name, array)
    return Products(
        front,
        rows,
        columns,
        given_x,
        given_w,
        given_y,
        x_view,
        w_view,
        y_view,
        read,
        result,
        given_v,
        v_view,
    )


def _values_of(problem: Problem, v: object, front: _Shape) -> Array | None:
    """Return the values of attention, None of a product, which has none.

    Raises:
        InvalidArray: they are missing, not wanted, or not for as many products as x and w.
    """
    if not problem.operation.has_values:
        refuse_values(problem, v)
        return None
    if v is None:
        raise InvalidArray(
            f"v is missing, the values (n, k) of {problem.text!r}: call the kernel as "
            "kernel(q, k, v)."
        )
    given = _array_of("v", v, "(n, k)")
    _check_front("v", given, 2, front, "values for each, or 1 where all have the same")
    return given


def _check_front(name: str, given: Array, own: int, front: _Shape, wanted: str) -> None:
    """Check that an array has for each product its `own` last dimensions, or the same for some.

    Raises:
        InvalidArray: the dimensions before them are not those of the products, `front`, or 1.
    """
    lead = given.shape[: given.ndim - own]
    behind = front[max(0, len(front) - len(lead)) :]
    if len(lead) > len(front) or any(
        length not in {1, products} for length, products in zip(lead, behind, strict=True)
    ):
        raise InvalidArray(
            f"{name} has the shape {given.shape}, but there are {front} products: pass {wanted}."
        )


def refuse_values(problem: Problem, v: object) -> None:
    """Check that no values are given to a problem that has none.

    Raises:
        InvalidArray: some are.
    """
    if v is not None:
        second = "packed" if problem.operation.packs_ahead else "w"
        raise InvalidArray(
            f"{problem.text!r} has no values: call the kernel as kernel(x, {second}), and give "
            "everything else by its name."
        )


def check_packs(problem: Problem) -> None:
    """Check that weights of a problem are packed ahead of calls.

    Raises:
        InvalidSetting: there is nothing to pack ahead.
    """
    if problem.operation.packs_ahead:
        return
    call = "kernel(q, k, v)" if problem.operation.has_values else "kernel(x, w)"
    raise InvalidSetting(
        f"{problem.text!r} multiplies activations alone, of which nothing is packed ahead; call "
        f"the kernel as {call}."
    )


def _array_of(name: str, value: object, shape: str) -> Array:
    array = as_array(name, value)
    if not isinstance(array, np.ndarray):
        raise InvalidArray(
            f"{name} is a {type(array).__name__}, not a numpy.ndarray: pass numpy.asarray({name})."
        )
    if not 2 <= array.ndim <= _MOST_DIMENSIONS:
        raise InvalidArray(
            f"{name} has the shape {array.shape}, but {shape} is needed, with batch and heads in "
            f"front or without: pass {name}.reshape to that."
        )
    return array


def _front_of(names: tuple[str, str], x: Array, w: Array) -> _Shape:
    """Return what x and w have in front of their last two dimensions, or one for both."""
    if x.shape[:-2] == w.shape[:-2]:
        return x.shape[:-2]
    try:
        return np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    except ValueError:
        first, second = names
        raise InvalidArray(
            f"{first} has {x.shape[:-2]} products and {second} {w.shape[:-2]}: pass as many of "
            "each, or 1 where all have the same."
        ) from None


def _view(
    name: str, array: Array, front: _Shape, shape: tuple[int, int], dtype: DType
) -> ArrayView:
    """Return where the matrices of all products lie.

    Raises:
        InvalidArray: they have another type, shape or strides than a kernel reads.
    """
    view = view_output if name == "out" else partial(view_matrix, name)
    one = view(_first_of(array, 2), shape, dtype)
    if 0 in front:
        return _NOWHERE
    return ArrayView(one.address, one.leading_dimension, *_strides(name, array, front, 2))


def _first_of(array: Array, own: int) -> Array:
    """Return the array of the first product, or one of its kind where there is none."""
    lead = array.ndim - own
    if 0 in array.shape[:lead]:
        return np.empty(array.shape[lead:], array.dtype)
    first: Array = array[(0,) * lead]
    return first


def _strides(name: str, array: Array, front: _Shape, own: int) -> tuple[int, int]:
    """Return the distances between the products of a batch and of heads, in elements.

    0 is the distance of what is missing or 1 in front of an array's `own` dimensions.
    """
    lead = array.ndim - own
    distances = [0, 0]
    for axis in range(lead):
        if array.shape[axis] == 1:
            continue
        distance, rest = divmod(array.strides[axis], array.itemsize)
        if rest:
            raise InvalidArray(
                f"{name} has products {array.strides[axis]} bytes apart, which is no whole number "
                f"of elements ({array.itemsize} bytes): pass {contiguous(name, array)}."
            )
        distances[len(front) - lead + axis] = distance
    return distances[0], distances[1]


def _operands_of(
    problem: Problem, operands: Mapping[str, object], front: _Shape, shape: tuple[int, int]
) -> CallOperands:
    views, arrays = [], {}
    for operand in problem.epilogue.operands:
        value = as_array(operand.name, operands[operand.name])
        view, array = _operand_of(problem, operand, value, front, shape)
        views.append(view)
        arrays[operand.name] = array
    return CallOperands(views, arrays)


def _operand_of(
    problem: Problem,
    operand: EpilogueOperand,
    value: object,
    front: _Shape,
    shape: tuple[int, int],
) -> tuple[ArrayView, Array]:
    """Return where an operand lies, and its array.

    Raises:
        InvalidArray: it cannot be used.
    """
    name, dtype = operand.name, problem.operand_type(operand)
    own = OPERAND_DIMENSIONS[operand.shape]
    if not (isinstance(value, np.ndarray) and value.ndim > own):
        return view_operand(name, value, operand.shape, shape, dtype)
    _check_front(name, value, own, front, "one for each, or one for all without them in front")
    one, _first = view_operand(name, _first_of(value, own), operand.shape, shape, dtype)
    if 0 in front:
        return _NOWHERE, value
    return ArrayView(one.address, one.leading_dimension, *_strides(name, value, front, own)), value


def _check_apart(y: Array) -> None:
    """Check that no two elements of what is written lie in one place.

    Raises:
        InvalidArray: they do, or it is not plain that they do not.
    """
    if y.size == 0:
        return
    reach = y.itemsize
    for stride_bytes, length in sorted(
        (abs(stride), length) for stride, length in zip(y.strides, y.shape, strict=True)
    ):
        if length > 1 and stride_bytes < reach:
            raise InvalidArray(
                "the products of out overlap each other in memory: pass another array."
            )
        reach += stride_bytes * (length - 1)
