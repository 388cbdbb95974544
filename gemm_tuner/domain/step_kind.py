"""A kind of epilogue step: a row of the table in `domain/step_table.py`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.spelling import (
    Argument,
    OneDnnPostOp,
    OnnxOperator,
    PassOperation,
    TorchOperator,
)

# References take the array namespace (numpy) as their first argument, so that this layer needs
# the standard library only.
Array = Any
Namespace = Any


class OperandShape(StrEnum):
    """The shape of what a step reads besides the value."""

    NONE = "none"
    SCALAR = "scalar"
    ROW_VECTOR = "row_vector"  # (n,)
    COLUMN_VECTOR = "column_vector"  # (m,)
    MATRIX = "matrix"  # (m, n), any leading dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorFunction:
    """A C++ function on vectors, or a table for one, that steps may call.

    `part` is the template that defines it, without its suffix; `needs` are what that one calls.
    Its constants fill `constants` registers. The code of a function that `is_long` is too much to
    repeat for each vector of a tile.
    """

    name: str
    part: str
    needs: tuple["VectorFunction", ...] = ()
    constants: int = 0
    is_long: bool = False

    def closure(self) -> Iterator["VectorFunction"]:
        """Yield the parts that it needs, and then itself."""
        for needed in self.needs:
            yield from needed.closure()
        yield self


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """One row of the table of epilogue steps.

    `operand_type` is the type of the operand, None for that of y, or f32 where y is of integers.
    A step that `is_offset` takes an offset of x off the sums of integers, before they become
    floats: its operand is that offset, and its reference gets the offset times the sums of w.
    The operand of one that `is_scale` brings sums to the range of y. One that `hides` makes scores
    of attention minus infinity by their place: its reference gets all of them, and kernels leave
    them out.

    `cpp` is a C++ expression over the vectors `value` and `operand` and the scalars named in
    `parameters`; it calls `functions`, and its own constants fill `constants` registers.

    `reference(xp, value, operand, *parameters)` is the same in float64. `whole_arrays` is another
    for float32, where the reference calls Python for each element.
    `error(xp, error, value, operand, *parameters)` bounds the error of the step's exact result
    when `value` has the absolute error `error`. `ulp` bounds the step's own error, in units in the
    last place of float32 of its result; `absolute` is its own absolute error, for results near
    zero.

    `after_product` is the operation by which the pass in C does the step after the product of a
    library; a step without one says in `left_to_numpy` why NumPy does it.
    `argument` is what libraries call an operand that they take at the head or end of a chain.
    `onednn` are the post-operations that compute the step; `onnx` and `torch` are operators. None
    says that the library has none.
    """

    name: str
    cpp: str
    reference: Callable[..., Array]
    operand: OperandShape = OperandShape.NONE
    operand_type: DType | None = None
    is_offset: bool = False
    is_scale: bool = False
    hides: bool = False
    parameters: tuple[tuple[str, float], ...] = ()
    functions: tuple[VectorFunction, ...] = ()
    constants: int = 0
    whole_arrays: Callable[..., Array] | None = None
    error: Callable[..., Array] = lambda _xp, error, *_others: error
    ulp: float = 1.0
    absolute: float = 0.0
    check: Callable[..., bool] = lambda *_parameters: True
    rule: str = ""
    after_product: PassOperation | None = None
    left_to_numpy: str = ""
    argument: Argument | None = None
    onednn: tuple[OneDnnPostOp, ...] | None = None
    onnx: OnnxOperator | None = None
    torch: TorchOperator | None = None

    @property
    def called(self) -> tuple[VectorFunction, ...]:
        """Return the functions that the step calls, and all that these need."""
        return tuple(one for function in self.functions for one in function.closure())

    @property
    def registers(self) -> int:
        """Return how many registers its constants and those of its functions fill."""
        return self.constants + sum(function.constants for function in set(self.called))

    @property
    def is_long(self) -> bool:
        """Return whether its code is too long to be repeated for each vector of a tile."""
        return any(function.is_long for function in self.called)
