"""The blocks of rows and columns, and the order of the loops over them.

Rows of x, columns of w, both or neither are cut to a half or a quarter of L2 (`space/cuts.py`). The
outer loops follow from that. Inside, a panel of w meets all tiles of rows, or a tile of rows all
panels. A search changes one of the three at a time. Where w is packed in the call, a block may be
so narrow that half of L1 keeps it, and all rows meet it as soon as it is packed. Of attention, the
scores of a block take a half or a quarter of L2: they are square, of more queries, of more keys, or
of all keys.

Tried first: no cut, panels outside, where x fits half of L2. Rows outside where L1 keeps all
weights and L2 does not keep y. A larger x is cut: its blocks stay in L2 while weights pass by. With
AMX and several tiles of rows, rows outside: L1 keeps those of a tile while weights pass, a quarter
of L2 at a time, or an eighth where the next block is fetched into the rest. Blocks of a copied x
are the outermost loop then, so that each is copied once. Where w is packed in the call, its columns
are cut instead, so that each block is packed once: for L1 where L2 keeps y and half of it x, else
rows are outside where L2 does not keep y. Scores are square, of a quarter of L2.
"""

from collections.abc import Iterator
from math import ceil, isqrt, lcm

from gemm_tuner.domain.blocking import Blocking, LoopOrder
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.micro_kernel import Can, MicroKernel, MicroKernelFamily
from gemm_tuner.domain.next_block import lines_of_tiles
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.cuts import CUTS, CUTS_BESIDE_NEXT, Cut, Residence
from gemm_tuner.space.tile import Tile, round_up

# A cache line and its neighbour, which many CPUs fetch with it.
_NEIGHBOURS_BYTES = 128
_ORDER_OF_ATTENTION = LoopOrder.IC_JC_JR_IR.value


def _blocks(tile: Tile, choice: Choice, cut: Cut) -> tuple[int, int, LoopOrder]:
    """Return mc, nc and the order of the loops that a cut comes to."""
    problem = tile.problem
    if problem.operation.has_values:
        return _blocks_of_scores(tile, cut)
    mc = round_up(max(1, problem.m.high), tile.mr)
    nc = round_up(max(1, problem.n), tile.nr)
    fitting = tile.l2_bytes // cut.l2_parts // problem.types.w.row_bytes(choice.kc)
    if cut.residence is Residence.PANELS and choice.pack_w:
        fitting = _columns_in_l1(tile, choice)
    # A packed block, of x or of w, has to stay in L2, or packing it was in vain.
    if cut.residence in {Residence.X, Residence.BOTH} or choice.pack_x:
        packed = tile.family.packed_x(problem.types.x) if choice.pack_x else None
        row_bytes = (
            packed.size_bytes * choice.kc if packed else problem.types.w.row_bytes(choice.kc)
        )
        rows = tile.l2_bytes // cut.l2_parts // row_bytes
        mc = min(mc, max(tile.mr, rows // tile.mr * tile.mr))
    passes_blocks = cut in CUTS_BESIDE_NEXT
    if cut.residence in {Residence.W, Residence.BOTH} or choice.pack_w or passes_blocks:
        nc = min(nc, max(tile.nr, fitting // tile.nr * tile.nr))
    return mc, nc, cut.loop_order


def _reads_once(tile: Tile) -> bool:
    return Can.READ_WEIGHTS_ONCE in tile.family.can and tile.problem.m.high > tile.mr


def offered_cuts(tile: Tile, choice: Blocking) -> tuple[Cut, ...]:
    """Return the cuts that a tile may have; those beside a next block where it is fetched."""
    can_fetch = Can.FETCH_NEXT_BLOCK in tile.family.can and not choice.pack_w
    return CUTS + CUTS_BESIDE_NEXT * can_fetch


def _columns_in_l1(tile: Tile, choice: Choice) -> int:
    """Return the columns of a block of w that half of L1 keeps, or a few more.

    Of rows along n that half of L2 does not keep, two cache lines at least are read at a time.
    """
    problem = tile.problem
    weights = problem.types.w
    are_far = problem.w_layout is WeightLayout.KN and problem.w_bytes > tile.l2_bytes // 2
    least = ceil(_NEIGHBOURS_BYTES / weights.row_bytes(1)) if are_far else 1
    kept = tile.cpu.caches.l1d_bytes // 2 // weights.row_bytes(choice.kc)
    return round_up(max(least, kept // tile.nr * tile.nr), tile.nr)


def _blocks_of_scores(tile: Tile, cut: Cut) -> tuple[int, int, LoopOrder]:
    """Return queries and keys of a block, whose scores take a part of L2.

    A block is square, or has four times as many queries, or keys, or all keys at once. Blocks of
    keys are even. The outer loop is that over queries.
    """
    problem = tile.problem
    m, n = max(1, problem.m.high), max(1, problem.n)
    scores = tile.l2_bytes // cut.l2_parts // DType.F32.size_bytes
    side = isqrt(scores)
    keys = {
        Residence.NOTHING: n,
        Residence.X: side // 2,
        Residence.W: side * 2,
    }.get(cut.residence, side)
    blocks = ceil(n / max(1, keys))
    nc = round_up(ceil(n / blocks), lcm(tile.nr, tile.family.k_multiple))
    rows = max(tile.mr, scores // nc // tile.mr * tile.mr)
    mc = min(round_up(m, tile.mr), rows)
    order = LoopOrder.IC_JC_IR_JR if cut.is_ir_outer else LoopOrder.IC_JC_JR_IR
    return mc, nc, order


def _choices(tile: Tile, choice: Choice) -> Iterator[tuple[int, int, LoopOrder]]:
    for cut in offered_cuts(tile, choice):
        yield _blocks(tile, choice, cut)


def _settle(tile: Tile, choice: Choice) -> Choice:
    mc, nc, order = _blocks(tile, choice, choice.cut)
    return choice.having(mc=mc, nc=nc, loop_order=order)


def _first(tile: Tile, choice: Choice) -> Choice:
    problem, caches = tile.problem, tile.cpu.caches
    if problem.operation.has_values:
        return choice.having(cut=Cut(residence=Residence.BOTH, l2_parts=4))
    x_bytes = problem.m.high * choice.kc * problem.types.x.size_bytes
    whole_x_bytes = problem.m.high * problem.types.x.row_bytes(problem.k)
    y_leaves_l2 = problem.m.high * problem.types.y.row_bytes(problem.n) > caches.l2_bytes
    several_tiles_read_once = _reads_once(tile)
    if choice.pack_w and whole_x_bytes <= caches.l2_bytes // 2 and not y_leaves_l2:
        # L2 keeps x while one narrow block of w after the other is packed, in L1.
        cut = Cut(residence=Residence.PANELS, is_ir_outer=several_tiles_read_once)
    elif several_tiles_read_once:
        # L1 keeps rows of x while a block of weights passes them from L2.
        fits = tile.passes_x_once or problem.w_bytes <= caches.l2_bytes // 4
        residence = Residence.X if choice.pack_x and tile.fetches_blocks else Residence.W
        tiles = ceil(problem.m.high / tile.mr)
        fetches = tile.fetches_blocks and (choice.pack_x or lines_of_tiles(tiles) > 0)
        cut = Cut(residence=residence, l2_parts=8 if fetches else 4, is_ir_outer=True)
        cut = Cut(is_ir_outer=True) if fits else cut
    elif x_bytes <= caches.l2_bytes // 2:
        # Where caches near the core keep all panels, whole rows of a large y are written in order.
        keeps_panels = choice.pack_w or problem.w_bytes <= caches.l1d_bytes // 2
        cut = Cut(is_ir_outer=keeps_panels and y_leaves_l2)
    elif choice.pack_w:
        # Each block is packed once, for all rows.
        cut = Cut(residence=Residence.W, is_ir_outer=y_leaves_l2)
    elif tile.weights_leave_l2:
        cut = Cut(residence=Residence.X)
    else:
        cut = Cut(is_ir_outer=not choice.convert_once)
    return choice.having(cut=cut)


def _moves(tile: Tile, choice: Choice) -> Iterator[Choice]:
    for cut in offered_cuts(tile, choice):
        if cut.is_beside(choice.cut):
            yield choice.having(cut=cut)


def _refusal(
    problem: Problem, family: MicroKernelFamily, tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    if problem.operation.has_values and blocking.loop_order.is_jc_outer:
        return Refusal(
            what="loop over keys around that over queries", remedy=f"choose {_ORDER_OF_ATTENTION}"
        )
    step = family.k_multiple
    if problem.operation.has_values and blocking.nc % step:
        return Refusal(
            what=f"blocks of {blocking.nc} keys, of which {step} are multiplied at once",
            remedy=f"choose a multiple of {lcm(step, tile.nr)}",
        )
    for size, whole, of in ((blocking.mc, tile.mr, "rows"), (blocking.nc, tile.nr, "columns")):
        if size % whole:
            return Refusal(
                what=f"blocks of {size} {of}, which must be whole tiles of {whole}",
                remedy=f"choose a multiple of {whole}",
            )
    return None


AXIS = Axis(
    fields=("mc", "nc", "loop_order"),
    reads=("kc", "pack_x", "pack_w"),
    choices=_choices,
    refusal=_refusal,
    first=_first,
    settle=_settle,
    moves=_moves,
    of_attention=True,
)
