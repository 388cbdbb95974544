"""An epilogue in the parts that libraries have arguments for."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import EpilogueOperand, OperandShape, Step
from gemm_tuner.domain.spelling import Argument

Array = NDArray[Any]

_SCALES = frozenset({Argument.SCALE, Argument.CHANNEL_SCALE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A step of an epilogue, with what it reads if it reads something."""

    step: Step
    operand: EpilogueOperand | None
    array: Array | None
    dtype: DType

    @property
    def argument(self) -> Argument | None:
        """Return the argument that libraries have for such a step, at its place in a chain."""
        return self.step.kind.argument

    @property
    def is_matrix(self) -> bool:
        """Say whether it reads an array of the shape of y."""
        return self.operand is not None and self.operand.shape is OperandShape.MATRIX


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The epilogue of a workload: what stands at its head in this order, the rest, and its end.

    Zero points and scales are found only in products of bytes. `bias` is at the head too.
    """

    x_zero_point: Link | None
    scale: Link | None
    channel_scale: Link | None
    bias: Link | None
    others: tuple[Link, ...]
    y_zero_point: Link | None


def split_chain(workload: Workload) -> Chain:
    """Return the epilogue of a workload in parts."""
    links = links_of(workload)
    head: dict[Argument | None, Link] = {}
    y_zero_point = None
    if workload.problem.types.x.is_integer:
        if links and links[-1].argument is Argument.Y_ZERO_POINT:
            y_zero_point = links.pop()
        if links and links[0].argument is Argument.X_ZERO_POINT:
            head[Argument.X_ZERO_POINT] = links.pop(0)
        while links and links[0].argument in _SCALES - head.keys():
            scale = links.pop(0)
            head[scale.argument] = scale
    bias = links.pop(0) if links and links[0].argument is Argument.BIAS else None
    return Chain(
        x_zero_point=head.get(Argument.X_ZERO_POINT),
        scale=head.get(Argument.SCALE),
        channel_scale=head.get(Argument.CHANNEL_SCALE),
        bias=bias,
        others=tuple(links),
        y_zero_point=y_zero_point,
    )


def links_of(workload: Workload) -> list[Link]:
    """Return the epilogue of a workload, one step after the other."""
    problem = workload.problem
    operands = iter(problem.epilogue.operands)
    links = []
    for step in problem.epilogue.steps:
        operand = next(operands) if step.kind.operand is not OperandShape.NONE else None
        links.append(
            Link(
                step=step,
                operand=operand,
                array=workload.operands[operand.name] if operand else None,
                dtype=problem.operand_type(operand) if operand else problem.types.accumulator,
            )
        )
    return links
