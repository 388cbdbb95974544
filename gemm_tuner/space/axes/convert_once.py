"""Whether a block of a panel of weights is converted once, for all tiles that meet it.

Only weights that are packed, and not multiplied as they lie. Each tile of rows converts them, or
they are converted once, where several tiles meet a panel whose converted block fits half of L2. Not
where tiles of rows are the outer loop, nor with panels side by side.

Tried first: by each tile; from four tiles of rows on, once as well. With this word a search also
tries each depth of a block, because converted weights are larger.
"""

from collections.abc import Iterator

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.in_place import reads_w_in_place
from gemm_tuner.domain.micro_kernel import MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axes.kc import depths
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile


def _choices(tile: Tile, choice: Choice) -> tuple[bool, ...]:
    meets_several_tiles = min(choice.mc, tile.problem.m.high) > tile.mr
    converted_bytes = tile.nr * choice.kc * DType.F32.size_bytes // tile.family.k_step
    gains = meets_several_tiles and converted_bytes <= tile.l2_bytes // 2
    return (False, True) if gains else (False,)


def _refusal(
    problem: Problem, family: MicroKernelFamily, _tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    can_convert = (
        family.converts_weights(problem.types)
        and not blocking.loop_order.is_ir_outer
        and blocking.w_streams == 1
        and not reads_w_in_place(problem, blocking)
        # Scales would be rounded into the weights, in the place of the sums.
        and not (problem.is_fixed and problem.types.is_weight_only)
    )
    return Refusal(what="convert_once") if blocking.convert_once and not can_convert else None


def _moves(tile: Tile, choice: Choice) -> Iterator[Choice]:
    if tile.family.converts_weights(tile.problem.types):
        for kc in depths(tile):
            yield choice.having(convert_once=not choice.convert_once, kc=kc)


AXIS = Axis(
    fields=("convert_once",),
    reads=("mc", "kc", "loop_order", "w_streams", "pack_w"),
    choices=_choices,
    refusal=_refusal,
    moves=_moves,
    moves_last=True,
)
