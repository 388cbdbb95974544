"""The candidates for a problem on a CPU: every choice, and the neighbours of one.

A candidate is a register tile and one value on each axis below. The search starts from the default
of a tile and moves along one axis at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from math import ceil

from gemm_tuner.domain.blocking import NEAR_BYTES, Blocking, LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.kept_panel import panel_fits_registers
from gemm_tuner.domain.micro_kernel import Can, MicroKernel, MicroKernelFamily, PackedLayout
from gemm_tuner.domain.packed_format import packed_format
from gemm_tuner.errors import NoKernelFamily
from gemm_tuner.space.axes import UNROLLS, Axes, round_up
from gemm_tuner.space.catalog import CATALOG, family_named
from gemm_tuner.space.cuts import CUTS, Cut, Residence
from gemm_tuner.space.grouped import (
    TILES_THAT_CONVERT_ONCE,
    UNKNOWN_L2_BYTES,
    can_convert_once,
)
from gemm_tuner.space.limits import is_possible

# So few rows of x wait for their weights.
_FEW_ROWS = 4
# From so many columns on, multiplying a packed x takes far longer than packing it.
_MANY_COLUMNS = 1024
# Of so many sums, none waits for the one before: unrolling k brings little.
_SUMS_AT_ONCE = 8
# In so few steps of k, products take about as long as the epilogue, which should run beside them.
_FEW_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A point of the space: a tile and one value on each axis."""

    family: MicroKernelFamily
    mr: int
    nr: int
    kc: int
    cut: Cut
    pack_x: bool
    convert_once: bool
    prefetch_w_bytes: int
    prefetch_next_panel: bool
    w_streams: int
    shuffle_x: bool
    stream_y: bool
    k_unroll: int
    grid: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space(Axes):
    """Everything that could be generated for a problem on a CPU with a number of threads.

    With `like`, a candidate for the same layer with any m, only what reads weights packed as by it.
    The regime decides what is tried first, not what there is.
    """

    regime: Regime = Regime.HOT

    def __contains__(self, candidate: Candidate) -> bool:
        """Return whether the packed weights of `candidate` lie as they have to."""
        return self.like is None or self._format(candidate) == self._format(self.like)

    def tiles(self) -> Iterator[tuple[MicroKernelFamily, int, int]]:
        """Yield the register tiles that no limit speaks against."""
        for family in CATALOG.values():
            for mr, nr in family.tiles:
                if is_possible(self.problem, self.cpu, family, mr, nr):
                    yield family, mr, nr

    def defaults(self) -> list[Candidate]:
        """Return, for each tile, the blockings to try first.

        Raises:
            NoKernelFamily: no family of the catalog covers the problem on this CPU.
        """
        found = dict.fromkeys(
            candidate
            for tile in self.tiles()
            for choice in self._defaults(*tile)
            for candidate in islice(self._candidates_by_grid(choice), 1)
        )
        if not found:
            packed = f" in the format {self._format(self.like)!r}" if self.like else ""
            raise NoKernelFamily(
                f"no kernel family covers {self.problem.text!r}{packed} on {self.cpu.brand}; "
                'run "gemm-tuner cpu" to see what there is.'
            )
        return list(found)

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidates that differ from `candidate` in one choice, each once."""
        found: dict[str, Candidate] = {}
        for choice in self._choices_like(candidate):
            for other in self._moves(choice):
                neighbour = self.candidate(other)
                if neighbour in self:
                    found[neighbour.text] = neighbour
        found.pop(candidate.text, None)
        return list(found.values())

    def cuts_of(self, candidate: Candidate) -> list[Candidate]:
        """Return `candidate` cut for the threads in each way that its tile allows, one part last.

        There are none if `candidate` is not of this space.
        """
        found = (
            self.candidate(replace(choice, grid=grid))
            for choice in self._choices_like(candidate)
            for grid in self.grids(choice.family, choice.mr, choice.nr)
        )
        return list(dict.fromkeys(cut for cut in found if cut in self))

    def all(self) -> Iterator[Candidate]:
        """Yield every candidate, each once."""
        seen = set()
        for family, mr, nr in self.tiles():
            for choice in self._choices_of(family, mr, nr):
                candidate = self.candidate(choice)
                if candidate in self and candidate.text not in seen:
                    seen.add(candidate.text)
                    yield candidate

    def size(self) -> int:
        """Return how many candidates there are in any format, without making them all."""
        count = 0
        for family, mr, nr in self.tiles():
            start = self._defaults(family, mr, nr)[0]
            blocks = {
                (
                    grid,
                    pack_x,
                    *self._blocks(replace(start, kc=kc, cut=cut, pack_x=pack_x, grid=grid)),
                )
                for grid, kc, cut, pack_x in product(
                    self.grids(family, mr, nr), self.kcs(family), CUTS, (False, True)
                )
            }
            fetches_and_stores = sum(
                len(self.streams_y(family, kc))
                * (
                    len(self.prefetches(family))
                    + self.can_fetch_panels(
                        family, mr, nr, (grid[0], mc, kc, order), convert_once=convert_once
                    )
                )
                for grid, _pack_x, mc, _nc, kc, order in blocks
                for convert_once in (False, True)
                if not convert_once
                or can_convert_once(self.problem, self.cpu, family, (mr, nr), (mc, kc, order))
            )
            ways = len(self.w_streams(family, nr)) * len(self.shuffles(family, mr, nr))
            count += fetches_and_stores * ways * len(UNROLLS)
        return count

    def candidate(self, choice: Choice) -> Candidate:
        """Return the candidate that a choice stands for."""
        mr, nr = choice.mr, choice.nr
        mc, nc, kc, order = self._blocks(choice)
        convert_once = choice.convert_once and can_convert_once(
            self.problem, self.cpu, choice.family, (mr, nr), (mc, kc, order)
        )
        return Candidate(
            micro_kernel=MicroKernel(family=choice.family.name, mr=mr, nr=nr),
            blocking=Blocking(
                mc=mc,
                nc=nc,
                kc=kc,
                loop_order=order,
                pack_x=choice.pack_x and not choice.family.is_in_fixed_point,
                convert_once=convert_once,
                prefetch_w_bytes=choice.prefetch_w_bytes,
                prefetch_next_panel=choice.prefetch_next_panel
                and self.can_fetch_panels(
                    choice.family,
                    mr,
                    nr,
                    (choice.grid[0], mc, kc, order),
                    convert_once=convert_once,
                ),
                w_streams=choice.w_streams,
                shuffle_x=choice.shuffle_x,
                stream_y=choice.stream_y and self.streams_y(choice.family, kc)[0],
                k_unroll=choice.k_unroll,
                grid_m=choice.grid[0],
                grid_n=choice.grid[1],
                grid_k=choice.grid[2],
            ),
        )

    def _candidates_by_grid(self, choice: Choice) -> Iterator[Candidate]:
        """Yield the candidates that differ from `choice` in the grid at most, the best first."""
        for grid in self.grids(choice.family, choice.mr, choice.nr):
            candidate = self.candidate(replace(choice, grid=grid))
            if candidate in self:
                yield candidate

    def _format(self, candidate: Candidate) -> str:
        return packed_format(self.problem, candidate, family_named(candidate.micro_kernel.family))

    def _blocks(self, choice: Choice) -> tuple[int, int, int, LoopOrder]:
        """Return mc, nc, kc and the order of the loops."""
        cut = choice.cut
        kc = self.depth_in_slices(choice.family, choice.kc, choice.grid[2])
        mc = round_up(max(1, self.problem.m.high), choice.mr)
        nc = round_up(max(1, self.problem.n), choice.nr)
        share_bytes = (self.cpu.caches.l2_bytes or UNKNOWN_L2_BYTES) // cut.l2_parts
        fitting = share_bytes // self.problem.types.w.row_bytes(kc)
        # A packed block of x has to stay in L2, or packing it was in vain.
        if cut.residence in {Residence.X, Residence.BOTH} or choice.pack_x:
            mc = min(mc, max(choice.mr, fitting // choice.mr * choice.mr))
        if cut.residence in {Residence.W, Residence.BOTH}:
            nc = min(nc, max(choice.nr, fitting // choice.nr * choice.nr))
        return mc, nc, kc, cut.loop_order

    def _defaults(self, family: MicroKernelFamily, mr: int, nr: int) -> list[Choice]:
        """Return one choice, or one for each way, order or number of streams that may be faster."""
        choice = self._default(family, mr, nr, self._deepest_first(family, mr, nr))
        others = [
            *self._conversions_first(family, mr, nr),
            *self._in_place_first(choice),
        ]
        if choice.cut.is_ir_outer:
            return [choice, replace(choice, cut=Cut()), *others]
        if Can.UNPACK_GROUPS in family.can or self.problem.m.high > _FEW_ROWS:
            return [choice, *others]
        # Streams that are far apart do not stand in each other's way.
        apart = [
            replace(choice, w_streams=streams, kc=max(self.kcs(family)), prefetch_w_bytes=0)
            for streams in self.w_streams(family, nr)
            if streams > 1 and self._fills_l3
        ]
        return [
            *apart,
            *(replace(choice, prefetch_w_bytes=ahead) for ahead in self._prefetches_first(family)),
            *others,
        ]

    def _deepest_first(self, family: MicroKernelFamily, mr: int, nr: int) -> int:
        """Return the depth of a block of k to try first: L2 keeps its panel for all tiles."""
        first, *others = self.kcs(family)
        if Can.REUSE_PANEL not in family.can or self.problem.m.high <= mr:
            return first
        most_bytes = (self.cpu.caches.l2_bytes or UNKNOWN_L2_BYTES) // 2
        weights = self.problem.types.w
        kept = [kc for kc in (first, *others) if weights.row_bytes(nr * kc) <= most_bytes]
        return max((kc for kc in kept if kc <= first), default=first)

    def _in_place_first(self, choice: Choice) -> list[Choice]:
        """Return the choice that reads x where it lies, in shallower blocks, if it is another."""
        family = choice.family
        if Can.REUSE_PANEL not in family.can:
            return []
        kcs = self.kcs(family)
        shallow = self._default(family, choice.mr, choice.nr, kcs[min(1, len(kcs) - 1)])
        in_place = replace(shallow, pack_x=False)
        return [in_place] if in_place != choice else []

    def _conversions_first(self, family: MicroKernelFamily, mr: int, nr: int) -> list[Choice]:
        """Return the choice that converts weights once in the deepest blocks, if there is one."""
        tiles = ceil(self.problem.m.high / mr)
        if not family.converts_weights(self.problem.types) or tiles < TILES_THAT_CONVERT_ONCE:
            return []
        for kc in self.kcs(family):
            choice = self._default(family, mr, nr, kc, convert_once=True)
            if self.candidate(choice).blocking.convert_once:
                return [choice]
        return []

    def _default(
        self, family: MicroKernelFamily, mr: int, nr: int, kc: int, *, convert_once: bool = False
    ) -> Choice:
        # A chunk of weights in groups is several steps, and is converted before it is used.
        is_unrolled = family.layout is PackedLayout.GROUPS
        sums = mr * nr if family.layout is PackedLayout.COLUMNS else mr * nr // family.lanes
        shuffle_x = self.shuffles(family, mr, nr)[0]
        streams_weights = self.problem.w_bytes > self.cpu.caches.l2_bytes
        x_bytes = self.problem.m.high * kc * self.problem.types.x.size_bytes
        x_fits_l2 = x_bytes <= self.cpu.caches.l2_bytes // 2
        if x_fits_l2:
            # Where L1 keeps all weights, whole rows of a large y are written in order.
            y_bytes = self.problem.m.high * self.problem.types.y.row_bytes(self.problem.n)
            keeps_weights = self.problem.w_bytes <= self.cpu.caches.l1d_bytes // 2
            cut = Cut(is_ir_outer=keeps_weights and y_bytes > self.cpu.caches.l2_bytes)
        else:
            cut = (
                Cut(residence=Residence.X) if streams_weights else Cut(is_ir_outer=not convert_once)
            )
        choice = Choice(
            family=family,
            mr=mr,
            nr=nr,
            kc=kc,
            cut=cut,
            pack_x=self._packs_x_first(family, nr),
            convert_once=convert_once,
            prefetch_w_bytes=self._prefetches_first(family)[0],
            prefetch_next_panel=False,
            w_streams=1,
            shuffle_x=shuffle_x,
            stream_y=self.streams_y(family, kc)[0],
            k_unroll=1 if is_unrolled or shuffle_x else self._unroll_first(family, nr, sums),
            grid=self.grids(family, mr, nr)[0],
        )
        ahead = replace(choice, prefetch_w_bytes=0, prefetch_next_panel=True)
        return ahead if self.candidate(ahead).blocking.prefetch_next_panel else choice

    def _unroll_first(self, family: MicroKernelFamily, nr: int, sums: int) -> int:
        """Return how far to unroll k at first; 1 keeps a panel in registers where it can."""
        fits = panel_fits_registers(self.problem, family, nr)
        # Products of pairs take twice as long on some cores.
        gains = fits and family.k_step != 2
        if gains and ceil(self.problem.k / family.k_step) <= _FEW_STEPS:
            return 1
        if sums < _SUMS_AT_ONCE:
            return 4
        return 2 if fits and not (gains and nr == family.lanes) else 1

    def _prefetches_first(self, family: MicroKernelFamily) -> tuple[int, ...]:
        """Return how far ahead to fetch weights at first, in bytes, the most promising in front.

        The hardware fetches a single stream well, except on some CPUs where small elements or
        several rows leave it no time.
        """
        w_bytes, caches = self.problem.w_bytes, self.cpu.caches
        if w_bytes <= caches.l1d_bytes:
            return (0,)
        is_cold = self.regime is Regime.COLD_WEIGHTS
        near = (NEAR_BYTES,) if self.can_fetch_near(family) else ()
        if near and is_cold:
            return (*near, 0)
        if self.problem.m.high > 1 or family.layout is PackedLayout.GROUPS:
            if w_bytes <= caches.l2_bytes:
                return (8192 if is_cold else 0,)
            is_few = self.problem.m.high <= _FEW_ROWS and Can.UNPACK_GROUPS not in family.can
            return (16384, 0, *(near if self._fills_l3 else ())) if is_few else (16384,)
        if self._fills_l3:
            return (0, *near)
        is_brief = self.problem.types.x.size_bytes < 4 and not is_cold
        return (0, 4096) if is_brief and caches.l2_bytes < w_bytes else (0,)

    @property
    def _fills_l3(self) -> bool:
        return self.problem.w_bytes >= self.cpu.caches.l3_bytes // 2

    def _packs_x_first(self, family: MicroKernelFamily, nr: int) -> bool:
        """Return whether a copy of x promises more than it costs.

        It does if rows, dense, share L1 sets, and in registers of one row are not few and meet many
        columns; or if x ends in a part of a tile, which each panel would copy, and there are no
        fewer panels than tiles along k.
        """
        is_reused = self.problem.m.high > _FEW_ROWS and self.problem.n >= _MANY_COLUMNS
        broadcasts = Can.BROADCAST_X in family.can
        if family.register_rows == 1 and not (broadcasts and is_reused):
            return False
        k = self.problem.k
        row_bytes = self.problem.types.x.row_bytes(k)
        ends_in_part = family.k_tile > 0 and k % family.k_tile > 0
        panels = ceil(self.problem.n / nr)
        return (row_bytes > 0 and row_bytes % 4096 == 0) or (
            ends_in_part and ceil(k / family.k_tile) <= panels
        )

    def _choices_of(self, family: MicroKernelFamily, mr: int, nr: int) -> Iterator[Choice]:
        prefetches = [*((ahead, False) for ahead in self.prefetches(family)), (0, True)]
        for (
            kc,
            cut,
            pack_x,
            convert_once,
            prefetch,
            w_streams,
            shuffle_x,
            stream_y,
            k_unroll,
            grid,
        ) in product(
            self.kcs(family),
            CUTS,
            (False, True),
            (False, True) if family.converts_weights(self.problem.types) else (False,),
            prefetches,
            self.w_streams(family, nr),
            self.shuffles(family, mr, nr),
            self.streams_y(family, self.problem.k),
            UNROLLS,
            self.grids(family, mr, nr),
        ):
            yield Choice(
                family=family,
                mr=mr,
                nr=nr,
                kc=kc,
                cut=cut,
                pack_x=pack_x,
                convert_once=convert_once,
                prefetch_w_bytes=prefetch[0],
                prefetch_next_panel=prefetch[1],
                w_streams=w_streams,
                shuffle_x=shuffle_x,
                stream_y=stream_y,
                k_unroll=k_unroll,
                grid=grid,
            )

    def _choices_like(self, candidate: Candidate) -> Iterator[Choice]:
        """Yield the choices that stand for `candidate`; several cuts may come to the same."""
        tile, blocking = candidate.micro_kernel, candidate.blocking
        for cut in CUTS:
            choice = Choice(
                family=family_named(tile.family),
                mr=tile.mr,
                nr=tile.nr,
                kc=blocking.kc,
                cut=cut,
                pack_x=blocking.pack_x,
                convert_once=blocking.convert_once,
                prefetch_w_bytes=blocking.prefetch_w_bytes,
                prefetch_next_panel=blocking.prefetch_next_panel,
                w_streams=blocking.w_streams,
                shuffle_x=blocking.shuffle_x,
                stream_y=blocking.stream_y,
                k_unroll=blocking.k_unroll,
                grid=(blocking.grid_m, blocking.grid_n, blocking.grid_k),
            )
            if self.candidate(choice) == candidate:
                yield choice

    def _moves(self, choice: Choice) -> Iterator[Choice]:
        for cut in CUTS:
            if cut.is_beside(choice.cut):
                yield replace(choice, cut=cut)
        for kc in self.kcs(choice.family):
            yield replace(choice, kc=kc)
        yield replace(choice, pack_x=not choice.pack_x)
        for prefetch in self.prefetches(choice.family):
            yield replace(choice, prefetch_w_bytes=prefetch, prefetch_next_panel=False)
        yield replace(choice, prefetch_w_bytes=0, prefetch_next_panel=True)
        for w_streams in self.w_streams(choice.family, choice.nr):
            yield replace(choice, w_streams=w_streams)
        for shuffle_x in self.shuffles(choice.family, choice.mr, choice.nr):
            yield replace(choice, shuffle_x=shuffle_x)
        yield replace(choice, stream_y=not choice.stream_y)
        for k_unroll in UNROLLS:
            yield replace(choice, k_unroll=k_unroll)
        kcs = self.kcs(choice.family)
        for grid in self.grids(choice.family, choice.mr, choice.nr):
            yield replace(choice, kc=choice.kc if choice.kc in kcs else kcs[0], grid=grid)
        yield from self._moves_of_conversion(choice)
        yield from self._moves_of_tile(choice)

    def _moves_of_conversion(self, choice: Choice) -> Iterator[Choice]:
        """Yield the other way to convert weights, with each depth: converted, they are larger."""
        if choice.family.converts_weights(self.problem.types):
            for kc in self.kcs(choice.family):
                yield replace(choice, convert_once=not choice.convert_once, kc=kc)

    def _moves_of_tile(self, choice: Choice) -> Iterator[Choice]:
        """Yield the tiles beside, with what else they allow of the choice."""
        for mr, nr in self._tiles_beside(choice):
            grids = self.grids(choice.family, mr, nr)
            grid = choice.grid if choice.grid in grids else grids[0]
            all_streams = self.w_streams(choice.family, nr)
            w_streams = choice.w_streams if choice.w_streams in all_streams else 1
            shuffle_x = choice.shuffle_x and self.shuffles(choice.family, mr, nr)[0]
            yield replace(choice, mr=mr, nr=nr, w_streams=w_streams, shuffle_x=shuffle_x, grid=grid)

    def _tiles_beside(self, choice: Choice) -> Iterator[tuple[int, int]]:
        """Yield the family's tiles one register higher or lower, and the tallest one vector off."""
        family = choice.family
        possible = [
            tile for tile in family.tiles if is_possible(self.problem, self.cpu, family, *tile)
        ]
        step = 1 if family.layout is PackedLayout.COLUMNS else family.lanes
        for mr, nr in possible:
            if nr == choice.nr and abs(mr - choice.mr) == family.register_rows:
                yield mr, nr
        for nr in (choice.nr - step, choice.nr + step):
            heights = [height for height, width in possible if width == nr]
            if heights:
                yield max(heights), nr
