"""The blocks of rows and columns, and the order of the loops over them.

Rows of x, columns of w, both or neither are cut to a half or a quarter of L2 (`space/cuts.py`). The
outer loops follow from that. Inside, a panel of w meets all tiles of rows, or a tile of rows all
panels. A search changes one of the three at a time.

Tried first: no cut, panels outside, where x fits half of L2. Rows outside where L1 keeps all
weights and L2 does not keep y. A larger x is cut: its blocks stay in L2 while weights pass by.
"""

from collections.abc import Iterator
from dataclasses import replace

from gemm_tuner.domain.blocking import Blocking, LoopOrder
from gemm_tuner.domain.micro_kernel import MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.cuts import CUTS, Cut, Residence
from gemm_tuner.space.tile import Tile, round_up


def _blocks(tile: Tile, choice: Choice, cut: Cut) -> tuple[int, int, LoopOrder]:
    """Return mc, nc and the order of the loops that a cut comes to."""
    problem = tile.problem
    mc = round_up(max(1, problem.m.high), tile.mr)
    nc = round_up(max(1, problem.n), tile.nr)
    fitting = tile.l2_bytes // cut.l2_parts // problem.types.w.row_bytes(choice.kc)
    # A packed block of x has to stay in L2, or packing it was in vain.
    if cut.residence in {Residence.X, Residence.BOTH} or choice.pack_x:
        packed = tile.family.packed_x(problem.types.x) if choice.pack_x else None
        row_bytes = (
            packed.size_bytes * choice.kc if packed else problem.types.w.row_bytes(choice.kc)
        )
        rows = tile.l2_bytes // cut.l2_parts // row_bytes
        mc = min(mc, max(tile.mr, rows // tile.mr * tile.mr))
    if cut.residence in {Residence.W, Residence.BOTH}:
        nc = min(nc, max(tile.nr, fitting // tile.nr * tile.nr))
    return mc, nc, cut.loop_order


def _choices(tile: Tile, choice: Choice) -> Iterator[tuple[int, int, LoopOrder]]:
    for cut in CUTS:
        yield _blocks(tile, choice, cut)


def _settle(tile: Tile, choice: Choice) -> Choice:
    mc, nc, order = _blocks(tile, choice, choice.cut)
    return replace(choice, mc=mc, nc=nc, loop_order=order)


def _first(tile: Tile, choice: Choice) -> Choice:
    problem, caches = tile.problem, tile.cpu.caches
    x_bytes = problem.m.high * choice.kc * problem.types.x.size_bytes
    if x_bytes <= caches.l2_bytes // 2:
        # Where L1 keeps all weights, whole rows of a large y are written in order.
        y_bytes = problem.m.high * problem.types.y.row_bytes(problem.n)
        keeps_weights = problem.w_bytes <= caches.l1d_bytes // 2
        cut = Cut(is_ir_outer=keeps_weights and y_bytes > caches.l2_bytes)
    elif tile.weights_leave_l2:
        cut = Cut(residence=Residence.X)
    else:
        cut = Cut(is_ir_outer=not choice.convert_once)
    return replace(choice, cut=cut)


def _moves(_tile: Tile, choice: Choice) -> Iterator[Choice]:
    for cut in CUTS:
        if cut.is_beside(choice.cut):
            yield replace(choice, cut=cut)


def _refusal(
    _problem: Problem, _family: MicroKernelFamily, tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    for size, whole, of in ((blocking.mc, tile.mr, "rows"), (blocking.nc, tile.nr, "columns")):
        if size % whole:
            return Refusal(
                what=f"blocks of {size} {of}, which must be whole tiles of {whole}",
                remedy=f"choose a multiple of {whole}",
            )
    return None


AXIS = Axis(
    fields=("mc", "nc", "loop_order"),
    reads=("kc", "pack_x"),
    choices=_choices,
    refusal=_refusal,
    first=_first,
    settle=_settle,
    moves=_moves,
)
