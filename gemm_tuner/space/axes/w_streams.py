"""How many packed panels a tile reads side by side.

One to three, for up to four rows of x and weights that do not fit L2. In a given format as many as
make up a tile, which may be wider than its panels. Only outer products in whole vectors, and
weights packed ahead.

Tried first: one, or what the format asks for. Where weights are cold or fill half of L3 or more,
two or three as well, with deep blocks of k and without prefetch.
"""

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import Can, MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile

# So few rows of x wait for their weights.
_FEW_ROWS = 4


def _choices(tile: Tile, _choice: Choice) -> tuple[int, ...]:
    if not tile.problem.operation.packs_ahead:
        return (1,)
    if tile.given_panel:
        return (_panels_in(tile, tile.given_panel),)
    is_waiting = tile.problem.m.high <= _FEW_ROWS and tile.weights_leave_l2
    return (1, 2, 3) if is_waiting else (1,)


def _panels_in(tile: Tile, columns: int) -> int:
    """Return how many panels make up a tile, or one if it cannot be read so."""
    panels, rest = divmod(tile.nr, columns)
    can_split = _can_split(tile.family, tile.nr, panels) if panels else False
    return panels if can_split and rest == 0 else 1


def _can_split(family: MicroKernelFamily, columns: int, streams: int) -> bool:
    can_read = Can.READ_PANELS_SIDE_BY_SIDE in family.can
    return can_read and columns // family.lanes % streams == 0


def _refusal(
    problem: Problem, family: MicroKernelFamily, tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    streams = blocking.w_streams
    can_split = problem.operation.packs_ahead and _can_split(family, tile.nr, streams)
    return Refusal(what=f"ws{streams}") if streams > 1 and not can_split else None


AXIS = Axis(fields=("w_streams",), choices=_choices, refusal=_refusal)
