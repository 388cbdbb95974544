"""How many packed panels a tile reads side by side.

One or two, for one row of x and weights that do not fit L2. Only outer products in whole vectors.

Tried first: one. Two as well where weights fill half of L3 or more, with deep blocks of k and
without prefetch.
"""

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import Can, MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile


def _choices(tile: Tile, _choice: Choice) -> tuple[int, ...]:
    waits_for_weights = tile.problem.m.high == 1 and tile.weights_leave_l2
    return (1, 2) if waits_for_weights else (1,)


def _refusal(
    _problem: Problem, family: MicroKernelFamily, tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    streams, vectors = blocking.w_streams, tile.nr // family.lanes
    can_split = Can.READ_PANELS_SIDE_BY_SIDE in family.can and vectors % streams == 0
    return Refusal(what=f"ws{streams}") if streams > 1 and not can_split else None


AXIS = Axis(fields=("w_streams",), choices=_choices, refusal=_refusal)
