"""Whether a w that comes with each call is packed in it, block by block.

For products of two activations alone. Packed, a block is half of L2 at most, and each part of a
call packs what it reads. In place, micro-kernels read rows of w where they lie: of `kn` where one
step of k is multiplied at once, of `nk` dot products over whole vectors of k. Not where sums of the
columns of w are needed, which packing finds. Of attention, the values.

Tried first: packed; in place as well where it can be read so, and alone for up to four rows of
x, or eight queries.
"""

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.in_place import can_read_w_in_place, reads_w_in_place
from gemm_tuner.domain.micro_kernel import MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile

# Of so few rows of x, w is read about once.
FEW_ROWS = 4
# Beside so few queries, keys and values come from memory: a cache of what was said before.
_FEW_QUERIES = 8


def has_few_rows(problem: Problem) -> bool:
    """Return whether so few rows of x meet a w that comes with each call that they wait for it."""
    return problem.m.high <= (_FEW_QUERIES if problem.operation.has_values else FEW_ROWS)


def _choices(tile: Tile, _choice: Choice) -> tuple[bool, ...]:
    return (False,) if tile.problem.operation.packs_ahead else (True, False)


def _refusal(
    problem: Problem, family: MicroKernelFamily, _tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    if problem.operation.packs_ahead:
        return Refusal(what="pack_w") if blocking.pack_w else None
    if reads_w_in_place(problem, blocking) and not can_read_w_in_place(problem, family):
        return Refusal(what=f"w to read in place, as {problem.text!r} has it", remedy="add pack_w")
    return None


def _first(tile: Tile, choice: Choice) -> Choice:
    problem = tile.problem
    if problem.operation.packs_ahead:
        return choice
    in_place = has_few_rows(problem) and can_read_w_in_place(problem, tile.family)
    return choice.having(pack_w=not in_place)


AXIS = Axis(fields=("pack_w",), choices=_choices, refusal=_refusal, first=_first, of_attention=True)
