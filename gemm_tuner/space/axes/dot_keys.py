"""Whether the keys of attention are read in place, in dot products.

For few queries, beside which a pass that packs the keys takes as long as their product. A head is
whole vectors, and a tile of queries one of the dot products. Else keys are packed.

Tried first: in place for up to eight queries, where they can be.
"""

from dataclasses import replace

from gemm_tuner.domain.attention import dot_columns
from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axes.pack_w import has_few_rows
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile


def _choices(tile: Tile, _choice: Choice) -> tuple[bool, ...]:
    return (True, False) if _is_worth_trying(tile) else (False,)


def _is_worth_trying(tile: Tile) -> bool:
    """Return whether few queries meet keys that can be read so."""
    problem = tile.problem
    has_few = problem.operation.has_values and has_few_rows(problem)
    micro_kernel = MicroKernel(family=tile.family.name, mr=tile.mr, nr=tile.nr)
    return has_few and dot_columns(problem, tile.family, micro_kernel) > 0


def _refusal(
    problem: Problem, family: MicroKernelFamily, tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    if not blocking.dot_keys:
        return None
    if problem.operation.has_values and dot_columns(problem, family, tile):
        return None
    return Refusal(what="keys to read in dot products")


def _first(tile: Tile, choice: Choice) -> Choice:
    return replace(choice, dot_keys=_is_worth_trying(tile))


AXIS = Axis(
    fields=("dot_keys",), choices=_choices, refusal=_refusal, first=_first, of_attention=True
)
