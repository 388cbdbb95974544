"""The depth of a block of k.

All of k, or even blocks of about 1, 2, 4 and 8 KB of a row of x. Only all of k where y is narrower
than the accumulator. Blocks hold whole groups of weights. Where threads share k, each slice has the
same number of blocks. Of a `kn` that comes with each call, shorter blocks too: its rows may lie
pages apart, and few of them are walked at a time.

Tried first: the deepest block of up to 8 KB of a row whose panel takes at most half of L2. With AMX
2 KB of a row, and 1 KB of a longer one where several tiles of rows meet the weights: L1 keeps the
rows of a tile. All of k where half of L2 keeps all weights and a quarter of it not x, which is read
once. Where a `kn` outside L2 is packed beside an x that half of L2 keeps, the deepest of the
shorter blocks of which L1 keeps a panel. Beside a `kn` in place and few rows of x, 8 rows of w
where each is longer than a page, so that they are read as streams, else 32. Beside more rows of x,
128 where each is longer than half a page: the lines of such a panel share a few sets of L1, which
keeps only so many of them.
"""

from math import ceil

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import Can, MicroKernel, MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.space.axes.pack_w import FEW_ROWS
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile, round_up

# Of a row of x; the first two are tried first. L1 keeps the rows of a tile of AMX.
_TARGETS_BYTES = (8192, 2048, 1024, 4096)
_TARGETS_OF_TILES_BYTES = _TARGETS_BYTES[1:]
_TARGETS_OF_GROUPS_BYTES = (8192, 4096, 2048)  # besides all of k
# Of rows of a `kn` that comes with each call, besides the above: where it is packed, and in place.
_ROWS_TO_PACK = (192, 128)
_ROWS_IN_PLACE = (*_ROWS_TO_PACK, 32, 8)
_PAGE_BYTES = 4096


def depths(tile: Tile) -> tuple[int, ...]:
    """Return the depths of a block of k that is not cut into slices."""
    problem, family = tile.problem, tile.family
    k = max(1, problem.k)
    if family.layout is PackedLayout.GROUPS:
        return _depths_of_groups(problem, family)
    if family.layout is not PackedLayout.PANELS:
        return (k,)
    if problem.operation.has_values:
        return (round_up(k, family.k_multiple),)
    whole = round_up(k, family.k_multiple)
    if tile.like is not None:
        kc = tile.like.blocking.kc
        return (kc if kc < k and kc % family.k_multiple == 0 else whole,)
    if not (problem.types.y_holds_sums or family.k_tile):
        return (whole,)
    targets_bytes = _TARGETS_OF_TILES_BYTES if family.k_tile else _TARGETS_BYTES
    targets = [target // problem.types.x.size_bytes for target in targets_bytes]
    if family.k_tile and problem.m.high > tile.mr and k > targets[0]:
        targets[:2] = targets[1::-1]  # fewer steps: L1 keeps the rows of a tile
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
    usual = tuple(_in_slices(tile, kc, choice.grid_k) for kc in depths(tile))
    return tuple(dict.fromkeys([*usual, *_short_depths(tile, choice)]))


def _short_depths(tile: Tile, choice: Choice) -> list[int]:
    """Return depths of a few rows of w, where it comes with each call and lies in rows along n."""
    problem, family = tile.problem, tile.family
    is_of_rows = problem.w_layout is WeightLayout.KN and family.layout is PackedLayout.PANELS
    is_cut = choice.grid_k > 1 or family.k_tile
    if problem.operation.packs_ahead or is_cut or not (is_of_rows and problem.types.y_holds_sums):
        return []
    rows = _ROWS_TO_PACK if choice.pack_w else _ROWS_IN_PLACE
    return [kc for kc in rows if kc < problem.k and kc % family.k_multiple == 0]


def _settle(tile: Tile, choice: Choice) -> Choice:
    offered = _choices(tile, choice)
    if choice.pack_w and choice.kc in _ROWS_IN_PLACE and choice.kc not in offered:
        return choice.having(kc=min(offered))
    return choice.having(kc=_in_slices(tile, choice.kc, choice.grid_k))


def _refusal(
    problem: Problem, family: MicroKernelFamily, _tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    kc, group = blocking.kc, problem.w_group
    if problem.operation.has_values and kc < problem.k:
        return Refusal(
            what=f"blocks of {kc} elements of a head, which is multiplied at once",
            remedy=f"choose {round_up(problem.k, family.k_multiple)}",
        )
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
    first = _first_in_place(tile, choice) or _first_packed(tile, choice) or _deepest_first(tile)
    return choice.having(kc=first)


def _first_in_place(tile: Tile, choice: Choice) -> int | None:
    """Return the depth for rows of w that are read where they lie, if they are long enough."""
    short = [] if choice.pack_w else _short_depths(tile, choice)
    row_bytes = tile.problem.types.w.row_bytes(tile.problem.n)
    if tile.problem.m.high <= FEW_ROWS:
        offered = [kc for kc in short if kc < min(_ROWS_TO_PACK)]
        return min(offered, default=None) if row_bytes > _PAGE_BYTES else max(offered, default=None)
    kept = min(_ROWS_TO_PACK)
    return kept if row_bytes > _PAGE_BYTES // 2 and kept in short else None


def _first_packed(tile: Tile, choice: Choice) -> int | None:
    """Return the deepest block of a w outside L2 that L1 keeps, beside an x that L2 keeps."""
    problem, caches = tile.problem, tile.cpu.caches
    x_bytes = problem.m.high * problem.types.x.row_bytes(problem.k)
    if not (choice.pack_w and tile.weights_leave_l2 and x_bytes <= caches.l2_bytes // 2):
        return None
    short = _short_depths(tile, choice)
    kept = caches.l1d_bytes * 3 // 4 // problem.types.w.row_bytes(tile.nr)
    return max((kc for kc in short if kc <= kept), default=min(short, default=None))


def _deepest_first(tile: Tile) -> int:
    """Return the depth of the deepest blocks of which L2 keeps a panel for all tiles."""
    first, *others = depths(tile)
    if tile.passes_x_once:
        return max(depths(tile))
    if Can.REUSE_PANEL not in tile.family.can or tile.problem.m.high <= tile.mr:
        return first
    weights = tile.problem.types.w
    kept = [kc for kc in (first, *others) if weights.row_bytes(tile.nr * kc) <= tile.l2_bytes // 2]
    return max((kc for kc in kept if kc <= first), default=first)


AXIS = Axis(
    fields=("kc",),
    reads=("grid_k", "pack_w"),
    choices=_choices,
    refusal=_refusal,
    first=_first,
    settle=_settle,
    of_attention=True,
)
