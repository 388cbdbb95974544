"""The depth of a block of k.

All of k, or even blocks of about 1, 2, 4 and 8 KB of a row of x. Only all of k where y is narrower
than the accumulator. Blocks hold whole groups of weights. Where threads share k, each slice has the
same number of blocks.

Tried first: the deepest block of up to 8 KB of a row whose panel takes at most half of L2.
"""

from dataclasses import replace
from math import ceil

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import Can, MicroKernel, MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile, round_up

# Of a row of x; the first two are tried first. A tile of AMX reads whole rows of a block from L1.
_TARGETS_BYTES = (8192, 2048, 1024, 4096)
_TARGETS_OF_TILES_BYTES = _TARGETS_BYTES[1:]
_TARGETS_OF_GROUPS_BYTES = (8192, 4096, 2048)  # besides all of k


def depths(tile: Tile) -> tuple[int, ...]:
    """Return the depths of a block of k that is not cut into slices."""
    problem, family = tile.problem, tile.family
    k = max(1, problem.k)
    if family.layout is PackedLayout.GROUPS:
        return _depths_of_groups(problem, family)
    if family.layout is not PackedLayout.PANELS:
        return (k,)
    whole = round_up(k, family.k_multiple)
    if tile.like is not None:
        kc = tile.like.blocking.kc
        return (kc if kc < k and kc % family.k_multiple == 0 else whole,)
    if not (problem.types.y_holds_sums or family.k_tile):
        return (whole,)
    targets_bytes = _TARGETS_OF_TILES_BYTES if family.k_tile else _TARGETS_BYTES
    targets = [target // problem.types.x.size_bytes for target in targets_bytes]
    # Blocks of even depth, so that the last is not a sliver.
    first, second, *others = (
        _even_depth(k, target, family) if target < k else whole for target in targets
    )
    return tuple(dict.fromkeys([first, second, whole, *others]))


def depth_of_slice(tile: Tile, slices: int) -> int:
    """Return the depth of each of some slices of k, in whole steps."""
    return round_up(ceil(tile.problem.k / slices), max(16, tile.family.k_multiple))


def _even_depth(k: int, target: int, family: MicroKernelFamily) -> int:
    """Return the depth of even blocks of about `target` steps, in whole steps."""
    return round_up(ceil(k / ceil(k / target)), max(16, family.k_multiple))


def _depths_of_groups(problem: Problem, family: MicroKernelFamily) -> tuple[int, ...]:
    """Return the depths of a block of k, the deepest first: all of k, or whole groups."""
    k, group = max(1, problem.k), problem.w_group or 1
    if Can.UNPACK_GROUPS not in family.can or group >= k:
        return (k,)
    targets = [target // problem.types.x.size_bytes for target in _TARGETS_OF_GROUPS_BYTES]
    blocks = [ceil(ceil(k / ceil(k / target)) / group) * group for target in targets]
    return tuple(dict.fromkeys([k, *(kc for kc in blocks if kc < k)]))


def _in_slices(tile: Tile, kc: int, slices: int) -> int:
    """Return kc, or the depth of the even blocks of about kc that make up each slice of k."""
    return kc if slices == 1 else _even_depth(depth_of_slice(tile, slices), kc, tile.family)


def _choices(tile: Tile, choice: Choice) -> tuple[int, ...]:
    return tuple(_in_slices(tile, kc, choice.grid_k) for kc in depths(tile))


def _settle(tile: Tile, choice: Choice) -> Choice:
    return replace(choice, kc=_in_slices(tile, choice.kc, choice.grid_k))


def _refusal(
    problem: Problem, family: MicroKernelFamily, _tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    kc, group = blocking.kc, problem.w_group
    slices, blocks = blocking.grid_k, ceil(problem.k / kc)
    if slices > max(1, blocks):
        return Refusal(what=f"grid of {slices} slices for {blocks} blocks of k")
    if kc < problem.k and family.layout is PackedLayout.COLUMNS:
        return Refusal(
            what=f"blocks of {kc} steps of k for a dot product, which runs over all of k",
            remedy=f"choose {problem.k}",
        )
    step = family.k_multiple
    if kc < problem.k and kc % step > 0:
        return Refusal(
            what=f"blocks of {kc} steps of k, of which {step} are multiplied at once",
            remedy=f"choose a multiple of {step}, or {problem.k}",
        )
    has_whole_groups = Can.UNPACK_GROUPS in family.can and kc % (group or 1) == 0
    if group is None or kc >= problem.k or has_whole_groups:
        return None
    return Refusal(
        what=f"blocks of {kc} steps of k, which must be whole groups of weights, "
        "or all of k for tiles of AMX",
        remedy=f"choose {problem.k}",
    )


def _first(tile: Tile, choice: Choice) -> Choice:
    return replace(choice, kc=_deepest_first(tile))


def _deepest_first(tile: Tile) -> int:
    """Return the depth of the deepest blocks of which L2 keeps a panel for all tiles."""
    first, *others = depths(tile)
    if Can.REUSE_PANEL not in tile.family.can or tile.problem.m.high <= tile.mr:
        return first
    weights = tile.problem.types.w
    kept = [kc for kc in (first, *others) if weights.row_bytes(tile.nr * kc) <= tile.l2_bytes // 2]
    return max((kc for kc in kept if kc <= first), default=first)


AXIS = Axis(
    fields=("kc",),
    reads=("grid_k",),
    choices=_choices,
    refusal=_refusal,
    first=_first,
    settle=_settle,
)
