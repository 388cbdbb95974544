"""Problems drawn at random: all types, steps, layouts and groups that have a kernel on a CPU."""

from math import exp, log
from random import Random

from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import GROUP_SIZES, WHOLE_COLUMN
from gemm_tuner.errors import InvalidInput
from gemm_tuner.space.catalog import CATALOG

# A call takes less than about 20 ms; beside most types of f16 there is no library.
_MOST_FLOP = 2e8
_MOST_FLOP_OF_F16 = 2e7
_MOST_ROWS = 1024
_MOST_COLUMNS = 8192
_MOST_STEPS = 3


def draw_problem(dice: Random, cpu: Cpu) -> Problem:
    """Return a problem that a kernel for `cpu` computes, and that calls of a few ms compute."""
    families = [family for family in CATALOG.values() if family.isa <= cpu.isa]
    types_of_all = sorted({one for family in families for one in family.types}, key=_name)
    while True:
        types = dice.choice(types_of_all)
        is_f16 = DType.F16 in {types.x, types.w, types.accumulator}
        rows, n, k = _size(dice, _MOST_ROWS), _size(dice, _MOST_COLUMNS), _size(dice, _MOST_COLUMNS)
        if 2.0 * rows * n * k > (_MOST_FLOP_OF_F16 if is_f16 else _MOST_FLOP):
            continue
        layout = dice.choice(("nk", "kn"))
        if types.is_weight_only:
            layout += f":g{dice.choice((*GROUP_SIZES, WHOLE_COLUMN))}"
        try:
            return Problem.parse(f"{types.text} {rows}x{n}x{k} {layout} {_epilogue(dice, types)}")
        except InvalidInput:
            continue


def _name(types: OperandTypes) -> str:
    return types.text


def _size(dice: Random, most: int) -> int:
    """Return a size of which each magnitude is as likely as any other, often a round one."""
    size = int(exp(dice.uniform(0.0, log(most + 1))))
    step = dice.choice((1, 1, 8, 64))
    return round(size / step) * step if size >= step else size


def _epilogue(dice: Random, types: OperandTypes) -> str:
    offsets = [name for name, kind in STEP_KINDS.items() if kind.is_offset]
    others = [name for name in STEP_KINDS if name not in offsets]
    chosen: list[str] = []
    if types.accumulator is DType.S32:
        chosen += dice.choices(offsets, k=dice.choice((0, 0, 1)))
    if types.y is not DType.S32:
        chosen += dice.sample(others, k=dice.randint(0, _MOST_STEPS))
    return "+".join(chosen) or "none"
