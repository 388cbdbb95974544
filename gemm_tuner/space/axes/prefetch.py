"""How far ahead weights are fetched, or whether the next panel is instead.

Not at all, or 4, 8 or 16 KB ahead; of a w that comes with each call, where it is read in place for
up to four rows, or eight queries; of rows of w that are a few cache lines each, one line of each,
into L2. One or two rows that wait for weights outside L2: also 1 KB, into L2 alone, as of streams
of weights in groups. The next panel, into L2, of weights packed ahead, where it takes at most half
of L2 and either it is converted once or several tiles of more than four rows meet it, each fetching
its part: two, or as many as one turn of the micro-kernel reads lines. Of a `kn` outside L2 that
comes with each call, the next block where it is packed, and the next panel where it is read in
place: each of the first tiles fetches a cache line of each row. With AMX, the next block of weights
packed ahead: where a tile of rows meets all panels, each fetches a few lines of all of them, two
tiles to sixteen.

Tried first: the next panel where it can be fetched. Else 16 KB for weights that do not fit L2, 8 KB
where they are cold and rows more than four, and none for one row or for weights in L2; never far
ahead of panels side by side, nor where several tiles of AMX meet the weights. 4 KB for one row that
reads w in place, 8 KB where w are keys and few queries meet them. None and a distance are both
tried where CPUs differ, but always a distance for keys in place: a sweep times one head, which
caches keep, and a model has many.
"""

from collections.abc import Iterator
from math import ceil

from gemm_tuner.domain.blocking import NEAR_BYTES, Blocking
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.micro_kernel import Can, MicroKernel, MicroKernelFamily, PackedLayout
from gemm_tuner.domain.next_block import next_lines
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.space.axes.pack_w import has_few_rows
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile

_DISTANCES_BYTES = (4096, 8192, 16384)
# So few rows of x leave the core waiting for weights, which may be fetched just before their use.
_MOST_ROWS_THAT_FETCH_NEAR = 2
# So few rows of x wait for their weights.
_FEW_ROWS = 4
# Each tile fetches a cache line in every turn of the micro-kernel at most. One tile alone, which
# waits for its own panel, gains nothing.
_LINE_BYTES = 64
_LEAST_TILES_THAT_FETCH = 2


def distances_first(tile: Tile, choice: Choice) -> tuple[int, ...]:
    """Return how far ahead to fetch weights at first, in bytes, the most promising in front.

    The hardware fetches a single stream well, except on some CPUs where small elements or several
    rows leave it no time. Of panels side by side, far ahead is not where the next tile begins.
    """
    problem, family, caches = tile.problem, tile.family, tile.cpu.caches
    # With AMX, each of several tiles of rows would fetch the same weights.
    is_shared = Can.READ_WEIGHTS_ONCE in family.can and problem.m.high > tile.mr
    if problem.w_bytes <= caches.l1d_bytes or is_shared or not problem.operation.packs_ahead:
        return _distances_in_place(tile, choice)
    is_cold = tile.regime is Regime.COLD_WEIGHTS
    near = (NEAR_BYTES,) if _can_fetch_near(tile) else ()
    if choice.w_streams > 1 or (near and is_cold):
        return (*near, 0)
    if problem.m.high > 1 or family.layout is PackedLayout.GROUPS:
        return _distances_of_rows(tile, near)
    if tile.weights_fill_l3:
        return (0, *near)
    return (0, 4096) if tile.weights_leave_l2 and not is_cold else (0,)


def _distances_of_rows(tile: Tile, near: tuple[int, ...]) -> tuple[int, ...]:
    """Return how far ahead to fetch at first for several rows, or for weights in groups."""
    is_few = tile.problem.m.high <= _FEW_ROWS and Can.UNPACK_GROUPS not in tile.family.can
    if is_few and tile.weights_leave_l2:
        return (16384, 0, *(near if tile.weights_fill_l3 else ()))
    is_cold = tile.regime is Regime.COLD_WEIGHTS
    is_far = tile.weights_leave_l2 and tile.family.layout is PackedLayout.GROUPS
    if is_cold and not is_far:
        return (8192,)
    return (16384 if tile.weights_leave_l2 else 0,)


def _distances_in_place(tile: Tile, choice: Choice) -> tuple[int, ...]:
    if not _fetches_in_place(tile, choice):
        return (0,)
    if tile.problem.operation.has_values:
        return (_DISTANCES_BYTES[1],)
    return (_DISTANCES_BYTES[0], 0) if tile.problem.m.high == 1 else (0,)


def _can_fetch_near(tile: Tile) -> bool:
    """Return whether few rows wait for weights that are not in L2."""
    return (
        Can.FETCH_NEAR in tile.family.can
        and tile.problem.m.high <= _MOST_ROWS_THAT_FETCH_NEAR
        and tile.weights_leave_l2
    )


def _can_fetch_rows(tile: Tile, choice: Choice) -> bool:
    """Return whether tiles can fetch rows of a w that comes with the call, before they are read."""
    problem = tile.problem
    lines = ceil(problem.types.w.row_bytes(tile.nr) / _LINE_BYTES)
    return (
        _has_rows_to_fetch(problem, tile.family, choice)
        and problem.m.high > _FEW_ROWS
        and (choice.pack_w or not choice.loop_order.is_ir_outer)
        and tile.weights_leave_l2
        and choice.mc // tile.mr >= lines
    )


def _has_rows_to_fetch(
    problem: Problem, family: MicroKernelFamily, blocking: Choice | Blocking
) -> bool:
    """Return whether w comes with the call in rows along n, and is multiplied as it is."""
    return (
        Can.FETCH_NEXT_PANEL in family.can
        and not blocking.convert_once
        and not problem.operation.has_values
        and problem.w_layout is WeightLayout.KN
    )


def _can_fetch_panels(tile: Tile, choice: Choice) -> bool:
    """Return whether the next panel can be fetched.

    Tiles fetch a part of it each, so enough of them must meet a panel: of an m that is known, every
    part of the grid has a whole block of rows. Where a panel is converted once, the next is fetched
    meanwhile.
    """
    problem, family = tile.problem, tile.family
    if Can.FETCH_NEXT_BLOCK in family.can:
        return _can_fetch_blocks(tile, choice)
    tiles_fetch = (
        Can.FETCH_NEXT_PANEL in family.can
        and problem.m.high > _FEW_ROWS
        and not choice.loop_order.is_ir_outer
        and choice.mc // tile.mr >= max(_LEAST_TILES_THAT_FETCH, _lines_in_turn(tile))
        and (problem.m.exact is None or choice.mc - tile.mr < problem.m.exact // choice.grid_m)
    )
    panel_bytes = problem.types.w.row_bytes(tile.nr * choice.kc)
    return (
        (tiles_fetch or choice.convert_once)
        and tile.weights_leave_l2
        and panel_bytes <= tile.l2_bytes // 2
    )


def _can_fetch_blocks(tile: Tile, choice: Choice) -> bool:
    """Return whether tiles of rows can fetch the next block, which L2 keeps beside this one."""
    problem = tile.problem
    is_last = choice.nc >= problem.n and choice.kc >= problem.k
    return (
        choice.loop_order.is_ir_outer
        and not is_last
        and next_lines(problem.m.high, tile.mr, choice) > 0
        and problem.w_bytes > tile.l2_bytes // 2
        and problem.types.w.row_bytes(choice.nc * choice.kc) <= tile.l2_bytes // 4
    )


def _lines_in_turn(tile: Tile) -> int:
    """Return how many cache lines of a panel one turn of the micro-kernel reads."""
    turn_bytes = tile.problem.types.w.row_bytes(tile.nr * tile.family.k_step)
    return ceil(turn_bytes / _LINE_BYTES)


def _choices(tile: Tile, choice: Choice) -> Iterator[tuple[int, bool]]:
    operation, in_place = tile.problem.operation, _fetches_in_place(tile, choice)
    if not (operation.has_values and in_place):
        yield 0, False
    if not operation.packs_ahead:
        if in_place:
            for ahead in _DISTANCES_BYTES:
                yield ahead, False
        if _can_fetch_rows(tile, choice):
            yield 0, True
        return
    if tile.problem.w_bytes > tile.cpu.caches.l1d_bytes:
        is_split = tile.family.layout is PackedLayout.GROUPS and choice.w_streams > 1
        near = (NEAR_BYTES,) if is_split or _can_fetch_near(tile) else ()
        for ahead in (*_DISTANCES_BYTES, *near):
            yield ahead, False
    if _can_fetch_panels(tile, choice):
        yield 0, True


def _fetches_in_place(tile: Tile, choice: Choice) -> bool:
    """Return whether few rows of x wait for a w that comes with the call and is read as it lies."""
    problem = tile.problem
    is_large = problem.w_bytes > tile.cpu.caches.l1d_bytes
    return is_large and has_few_rows(problem) and _reads_in_place(problem, choice)


def _reads_in_place(problem: Problem, blocking: Choice | Blocking) -> bool:
    """Return whether w is not packed; of attention, whether keys or values are not."""
    packs_all = blocking.pack_w and not blocking.dot_keys
    return not (problem.operation.packs_ahead or packs_all)


def _refusal(
    problem: Problem, family: MicroKernelFamily, _tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    is_known = problem.operation.packs_ahead or _reads_in_place(problem, blocking)
    if blocking.prefetch_w_bytes and not is_known:
        return Refusal(what=f"pf{blocking.prefetch_w_bytes}")
    can_fetch = (
        not {Can.FETCH_NEXT_PANEL, Can.FETCH_NEXT_BLOCK}.isdisjoint(family.can)
        or blocking.convert_once
        if problem.operation.packs_ahead
        else _has_rows_to_fetch(problem, family, blocking)
    )
    return Refusal(what="pf_next") if blocking.prefetch_next_panel and not can_fetch else None


def _first(tile: Tile, choice: Choice) -> Choice:
    ahead, *_others = distances_first(tile, choice)
    return choice.having(prefetch_w_bytes=ahead)


AXIS = Axis(
    fields=("prefetch_w_bytes", "prefetch_next_panel"),
    reads=(
        "grid_m",
        "mc",
        "nc",
        "kc",
        "loop_order",
        "pack_w",
        "dot_keys",
        "convert_once",
        "w_streams",
    ),
    choices=_choices,
    refusal=_refusal,
    first=_first,
    of_attention=True,
)
