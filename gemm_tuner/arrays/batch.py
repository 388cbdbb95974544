"""Arrays of a batch: products of the same sizes, one behind the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from gemm_tuner.abi import ArrayView
from gemm_tuner.arrays.advice import contiguous
from gemm_tuner.arrays.dlpack import as_array
from gemm_tuner.arrays.views import check_overlap
from gemm_tuner.domain.epilogue import EpilogueOperand, OperandShape
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray

OPERAND_DIMENSIONS = {
    OperandShape.SCALAR: 1,  # of one element
    OperandShape.ROW_VECTOR: 1,
    OperandShape.COLUMN_VECTOR: 1,
    OperandShape.MATRIX: 2,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """The weights of each product of a batch, in the layout that `packer` names.

    products: one row of bytes for each.
    """

    packer: str
    products: NDArray[Any]

    def check(self, kernel: str, batch: int) -> None:
        """Check that the weights have the layout that the kernel reads, one copy for each product.

        Raises:
            InvalidArray: they are packed in another layout, or for another number of products.
        """
        if self.packer != kernel:
            raise InvalidArray(
                f"packed has the layout {self.packer!r}, but this kernel reads {kernel!r}: "
                "pack the weights with this kernel."
            )
        if len(self.products) != batch:
            raise InvalidArray(
                f"packed holds the weights of {len(self.products)} products, but x has {batch}: "
                "pack as many, or pass the packed weights of one product for all."
            )

    def check_owner(self, _owner: str) -> None:
        """Refuse: these are the weights of several products.

        Raises:
            InvalidArray: always.
        """
        raise InvalidArray(
            f"packed holds the weights of a batch of {len(self.products)} products: "
            "call kernel.batch with it, or pack the weights of one product."
        )


def batch_of(name: str, array: object, wanted: str) -> NDArray[Any]:
    """Return an array of three dimensions.

    Raises:
        InvalidArray: it is no such array.
    """
    given = as_array(name, array)
    if not isinstance(given, np.ndarray) or given.ndim != 3:
        shape = getattr(given, "shape", None)
        raise InvalidArray(f"{name} has the shape {shape}, but a batch {wanted} is needed.")
    return given


def check_batch_shapes(x: NDArray[Any], out: NDArray[Any], problem: Problem) -> None:
    """Check the shapes of a batch, which may be empty.

    Raises:
        InvalidArray: x has not k columns, or out has not the shape of the result.
    """
    for name, array, columns in (("x", x, problem.k), ("out", out, problem.n)):
        wanted = (*x.shape[:2], columns)
        if array.shape != wanted:
            raise InvalidArray(
                f"{name} has the shape {array.shape}, but {wanted} is needed; "
                "check the array, or ask for a kernel of its size."
            )


def batch_of_weights(
    w: object, scales: object, zero_points: object
) -> list[tuple[object, object, object]]:
    """Return the weights, scales and zero points of each product, None for what is not given.

    Raises:
        InvalidArray: an array has not three dimensions, or is not for as many products as w.
    """
    products = batch_of("w", w, "of weights (batch, n, k) or (batch, k, n)")
    columns: list[list[object]] = [list(products)]
    for name, values in (("scales", scales), ("zero_points", zero_points)):
        given: list[object] = [None] * len(products)
        if values is not None:
            given = list(batch_of(name, values, "of groups (batch, n, groups)"))
        if len(given) != len(products):
            raise InvalidArray(
                f"{name} is for {len(given)} products, but w for {len(products)}: pass as many."
            )
        columns.append(given)
    return [(one, scale, zero) for one, scale, zero in zip(*columns, strict=True)]


def batched_operands(
    operands: Sequence[EpilogueOperand], values: Mapping[str, object], count: int
) -> dict[str, NDArray[Any]]:
    """Return the operands that have a leading batch dimension.

    Raises:
        InvalidArray: one is not given for each product.
    """
    batched = {}
    for operand in operands:
        array = as_array(operand.name, values.get(operand.name))
        if isinstance(array, np.ndarray) and array.ndim == OPERAND_DIMENSIONS[operand.shape] + 1:
            if len(array) != count:
                raise InvalidArray(
                    f"{operand.name} has the shape {array.shape}, but there are {count} products: "
                    "pass one array for each, or one for all without the batch dimension."
                )
            batched[operand.name] = array
    return batched


def products_of(
    operands: Sequence[EpilogueOperand], values: Mapping[str, object], count: int
) -> list[dict[str, object]]:
    """Return the operands of each product of a batch.

    Raises:
        InvalidArray: one is not given for each product.
    """
    batched = batched_operands(operands, values, count)
    return [
        {name: batched[name][item] if name in batched else value for name, value in values.items()}
        for item in range(count)
    ]


def view_products(
    name: str, array: NDArray[Any], view: Callable[[NDArray[Any]], ArrayView]
) -> ArrayView:
    """Return where the products' arrays lie, each of which `view` checks alone.

    Raises:
        InvalidArray: they are not a whole number of elements apart.
    """
    stride_bytes = array.strides[0]
    if stride_bytes % array.itemsize:
        raise InvalidArray(
            f"{name} has products {stride_bytes} bytes apart, which is no whole number of elements "
            f"({array.itemsize} bytes): pass {contiguous(name, array)}."
        )
    return replace(view(array[0]), batch_stride=stride_bytes // array.itemsize)


def check_batch_overlap(
    out: NDArray[Any], x: NDArray[Any], operands: dict[str, NDArray[Any]]
) -> None:
    """Check that what is written overlaps neither itself nor an input.

    Raises:
        InvalidArray: it does.
    """
    begin, end = byte_bounds(out[0])
    lies_apart = len(out) < 2 or abs(out.strides[0]) >= end - begin
    if not lies_apart and any(np.shares_memory(out[0], one) for one in out[1:]):
        raise InvalidArray("the products of out overlap each other in memory: pass another array.")
    check_overlap(out, "x", x)
    for name, array in operands.items():
        check_overlap(out, name, array)
