"""The first choices for a register tile: the first on each axis, and alternatives to it.

An alternative stands where measurements or CPUs disagree about which of two ways is faster.
"""

from collections.abc import Iterator
from math import ceil

from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.micro_kernel import Can, PackedLayout
from gemm_tuner.space.axes.kc import depths
from gemm_tuner.space.axes.pack_w import AXIS as PACK_W
from gemm_tuner.space.axes.prefetch import distances_first
from gemm_tuner.space.axes.w_streams import AXIS as W_STREAMS
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.cores import core_of
from gemm_tuner.space.cuts import CUTS_BESIDE_NEXT, Cut, Residence
from gemm_tuner.space.tile import Tile
from gemm_tuner.space.walk import settled, tried_first

# So few rows of x wait for their weights.
_FEW_ROWS = 4
# From so many tiles of rows on, weights are also converted once for all at first.
_TILES_THAT_CONVERT_ONCE = 4


def first_choices(tile: Tile) -> list[Choice]:
    """Return one choice, or one for each way, order or number of streams that may be faster."""
    choice = _fetching_panels(tile, tried_first(tile))
    others = [*_converted_once(tile), *_in_place(tile, choice), *_w_in_place(tile, choice)]
    if choice.cut.is_ir_outer:
        # Where w is packed in the call, L1 may keep its blocks although y leaves L2.
        is_for_l1 = choice.pack_w and choice.cut.residence is not Residence.PANELS
        other = Cut(residence=Residence.PANELS) if is_for_l1 else Cut()
        return [choice, *_of_copied_x(tile, choice), choice.having(cut=other), *others]
    if tile.problem.m.high > _FEW_ROWS:
        return [choice, *others]
    if Can.UNPACK_GROUPS in tile.family.can:
        return [choice, *_in_streams(tile, choice), *others]
    return [*_in_streams(tile, choice), *_fetched_ahead(tile, choice), *others]


def _fetching_panels(tile: Tile, choice: Choice) -> Choice:
    """Return the choice that fetches the next panel, where L2 lacks it and it can be fetched."""
    if not (tile.weights_leave_l2 or tile.regime is Regime.COLD_WEIGHTS):
        return choice
    ahead = choice.having(prefetch_w_bytes=0, prefetch_next_panel=True)
    return ahead if settled(tile, ahead).prefetch_next_panel else choice


def _converted_once(tile: Tile) -> Iterator[Choice]:
    """Yield the choice that converts weights once in the deepest blocks, if there is one."""
    tiles = ceil(tile.problem.m.high / tile.mr)
    if tiles < _TILES_THAT_CONVERT_ONCE or not tile.family.converts_weights(tile.problem.types):
        return
    for kc in depths(tile):
        choice = _fetching_panels(tile, tried_first(tile, kc=kc, convert_once=True))
        if settled(tile, choice).convert_once:
            yield choice
            return


def _in_place(tile: Tile, first: Choice) -> Iterator[Choice]:
    """Yield the choice that reads x where it lies, in shallower blocks, if it is another."""
    if Can.REUSE_PANEL not in tile.family.can:
        return
    kcs = depths(tile)
    if first.kc < min(kcs):
        return
    shallow = _fetching_panels(tile, tried_first(tile, kc=kcs[min(1, len(kcs) - 1)]))
    in_place = shallow.having(pack_x=False)
    if in_place != first:
        yield in_place


def _of_copied_x(tile: Tile, first: Choice) -> Iterator[Choice]:
    """Yield the choice that copies x where that reads it in place, or the other way round."""
    if first.cut in CUTS_BESIDE_NEXT:
        yield _fetching_panels(tile, tried_first(tile, pack_x=not first.pack_x))


def _w_in_place(tile: Tile, first: Choice) -> Iterator[Choice]:
    """Yield the choice that reads w where it lies, where that can be and is another."""
    for one in PACK_W.offered(tile, first):
        if one.pack_w < first.pack_w:
            yield _fetching_panels(tile, tried_first(tile, pack_w=False))


def _in_streams(tile: Tile, choice: Choice) -> Iterator[Choice]:
    """Yield the choice that reads panels side by side, far apart, where weights fill L3 or wait."""
    rates = core_of(tile.cpu).rates
    waits = tile.weights_fill_l3 or tile.regime is Regime.COLD_WEIGHTS
    # Where many streams are faster, they are no slower from L3, which neighbours may have filled.
    is_grouped = tile.family.layout is PackedLayout.GROUPS
    if not rates.reads_many_streams and (is_grouped or not waits):
        return
    far_apart = choice.having(kc=max(depths(tile)), prefetch_w_bytes=0)
    several = [one for one in W_STREAMS.offered(tile, far_apart) if one.w_streams > 1]
    fewer = [one for one in several if one.w_streams <= rates.streams]
    yield from fewer[-1:] or [one for one in several if one.w_streams <= rates.streams + 1]


def _fetched_ahead(tile: Tile, choice: Choice) -> Iterator[Choice]:
    """Yield the choice with each distance of prefetch that may be best."""
    for ahead in distances_first(tile, choice):
        yield choice.having(prefetch_w_bytes=ahead)
