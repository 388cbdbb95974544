"""Whether four steps of every fourth row of x are loaded at once, each picked by a shuffle.

For tiles one vector wide and at least eight rows tall, which need one load for each multiplication.
Only with AVX-512, and with steps of 4 bytes.

Tried first: shuffled.
"""

from math import ceil

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile

_FEWEST_ROWS = 8


def _choices(tile: Tile, _choice: Choice) -> tuple[bool, ...]:
    waits_for_loads = tile.nr == tile.family.lanes and tile.mr >= _FEWEST_ROWS
    fits = tile.mr + ceil(tile.mr / 4) + 2 <= tile.family.registers
    return (True, False) if waits_for_loads and fits else (False,)


def _refusal(
    problem: Problem, family: MicroKernelFamily, _tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    is_refused = blocking.shuffle_x and not family.can_shuffle(problem.types.x)
    return Refusal(what="shuffle_x") if is_refused else None


AXIS = Axis(fields=("shuffle_x",), choices=_choices, refusal=_refusal)
