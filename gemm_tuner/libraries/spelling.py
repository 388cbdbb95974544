"""The ways to ask oneDNN for one layer: what it fuses, and what another pass does."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape, Step
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.spelling import Argument

_FLOATS = (DType.F32, DType.F32)
_EXACT_IN_FLOATS = 2**24
_ZERO_POINTS = {Argument.X_ZERO_POINT, Argument.Y_ZERO_POINT}


class Columns(StrEnum):
    """How what has one element for each row of y is given to a product."""

    COLUMN = "as a column"
    MATRIX = "as a matrix"
    SCALES = "as scales of x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """One way to ask oneDNN for a problem.

    The product takes x, w and y in these types, and fuses the first `fused` steps of the epilogue;
    a pass converts x before it, and another does the rest after it. In a layer that `is_fixed`,
    scalars are constants of the product. A product is a `matmul` of oneDNN, or an `inner_product`.
    A w that comes with each call is multiplied as it is stored, or `reorders_w` to the layout that
    oneDNN likes best.
    """

    problem: Problem
    x: DType
    w: DType
    y: DType
    fused: int
    columns: Columns = Columns.COLUMN
    is_fixed: bool = False
    is_inner_product: bool = False
    reorders_w: bool = False

    @property
    def multiplies_stored_w(self) -> bool:
        """Say whether w is multiplied as it is stored, but for its type."""
        return not (self.problem.operation.packs_ahead or self.reorders_w)

    @property
    def converts_x(self) -> bool:
        """Say whether a pass stands before the product."""
        return self.x is not self.problem.types.x

    @property
    def needs_passes(self) -> bool:
        """Say whether a pass stands before or after the product."""
        return self.converts_x or self.needs_finish

    @property
    def needs_finish(self) -> bool:
        """Say whether a pass stands after the product."""
        return self.fused < len(self.problem.epilogue.steps) or self.y is not self.problem.types.y

    @property
    def fuses_columns(self) -> bool:
        """Say whether a fused step has an element for each row of y."""
        return _has_column(self.fused_steps)

    @property
    def fused_steps(self) -> tuple[Step, ...]:
        """Return the steps that the product fuses."""
        return self.problem.epilogue.steps[: self.fused]

    @property
    def rest(self) -> tuple[Step, ...]:
        """Return the steps of the pass after the product."""
        return self.problem.epilogue.steps[self.fused :]

    @property
    def text(self) -> str:
        """Return the share of fused steps in words: `1 of 2 steps fused, then a pass`."""
        steps = len(self.problem.epilogue.steps)
        parts = []
        if self.converts_x:
            parts.append(f"x and w in {self.x.value}")
        if self.is_inner_product:
            parts.append("as an inner product")
        if self.reorders_w:
            parts.append("w reordered")
        if steps:
            parts.append("fused" if self.fused == steps else f"{self.fused} of {steps} steps fused")
        if self.fuses_columns:
            parts.append(f"columns {self.columns.value}")
        if self.is_fixed:
            parts.append("scalars as constants")
        if self.needs_finish:
            parts.append("then a pass")
        return ", ".join(parts) or "product"


def spellings_of(problem: Problem, *, of_fixed_layer: bool) -> list[Spelling]:
    """Return the ways to ask for a problem of plain weights, the most usual first.

    Those in other types than its own stand last: they are for types that oneDNN lacks. A layer that
    is fixed may also have its scalars as constants.
    """
    types = problem.types
    products = [(types.x, types.w)]
    if (types.x, types.w) != _FLOATS and can_be_floats(problem):
        products.append(_FLOATS)
    return [
        Spelling(
            problem=problem,
            x=x,
            w=w,
            y=y,
            fused=fused,
            columns=columns,
            is_fixed=is_fixed,
            is_inner_product=is_inner_product,
            reorders_w=reorders_w,
        )
        for x, w in products
        for fused in _fused_counts(problem, x)
        for y in _types_of_y(problem, x, fused)
        for columns in _columns_of(problem, x, fused)
        for is_fixed in (
            (False, True)
            if of_fixed_layer and _has_scalar(problem.epilogue.steps[:fused])
            else (False,)
        )
        for is_inner_product in ((False, True) if (x, w) == _FLOATS else (False,))
        for reorders_w in ((False,) if problem.operation.packs_ahead else (False, True))
    ]


def can_be_floats(problem: Problem) -> bool:
    """Say whether a product in float32 is right for a problem.

    Of integers it is where each sum is exact in float32, or where y is no integer: then the errors
    are those of a layer in float32.
    """
    x, w, y = problem.types.x, problem.types.w, problem.types.y
    if not x.is_integer:
        return True
    greatest_sum = problem.k * _greatest(x) * _greatest(w)
    return greatest_sum <= _EXACT_IN_FLOATS or not y.is_integer


def _greatest(dtype: DType) -> int:
    """Return the greatest magnitude of an integer type."""
    limits = np.iinfo(NUMPY_TYPES[dtype])
    return max(-int(limits.min), int(limits.max))


def _fused_counts(problem: Problem, x: DType) -> list[int]:
    """Return how many steps may be fused: as many as can be, those before a column, none."""
    steps = problem.epilogue.steps
    is_converted_integer = problem.types.x.is_integer and not x.is_integer
    most = 0
    for place, step in enumerate(steps):
        if not _can_fuse(step, place, len(steps)) or (
            is_converted_integer and step.kind.argument in _ZERO_POINTS
        ):
            break
        most += 1
    columns = [
        place
        for place, step in enumerate(steps[:most])
        if step.kind.operand is OperandShape.COLUMN_VECTOR
    ]
    return list(dict.fromkeys((most, *columns[:1], 0)))


def _can_fuse(step: Step, place: int, steps: int) -> bool:
    if step.kind.argument is Argument.X_ZERO_POINT:
        return place == 0
    if step.kind.argument is Argument.Y_ZERO_POINT and place != steps - 1:
        return False
    return step.kind.onednn is not None


def _types_of_y(problem: Problem, x: DType, fused: int) -> list[DType]:
    types, steps = problem.types, problem.epilogue.steps
    if types.x.is_integer and not x.is_integer:
        return [DType.F32]
    offsets = [step.kind.is_offset for step in steps]
    is_of_sums = types.x.is_integer and all(offsets[:fused])
    wide = DType.S32 if is_of_sums else DType.F32
    if fused < len(steps):
        return [wide]
    return list(dict.fromkeys((types.y, wide)))


def _columns_of(problem: Problem, x: DType, fused: int) -> list[Columns]:
    steps = problem.epilogue.steps[:fused]
    if not _has_column(steps):
        return [Columns.COLUMN]
    after_offsets = [step.kind for step in steps if not step.kind.is_offset]
    first = after_offsets[0]
    is_scale_of_x = (
        x.is_integer
        and first.operand is OperandShape.COLUMN_VECTOR
        and first.is_scale
        and not _has_column(tuple(step for step in steps if step.kind is not first))
    )
    return [Columns.COLUMN, Columns.MATRIX, *([Columns.SCALES] if is_scale_of_x else [])]


def _has_column(steps: tuple[Step, ...]) -> bool:
    return any(step.kind.operand is OperandShape.COLUMN_VECTOR for step in steps)


def _has_scalar(steps: tuple[Step, ...]) -> bool:
    return any(
        step.kind.operand is OperandShape.SCALAR and not step.kind.is_offset for step in steps
    )
