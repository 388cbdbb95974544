"""The values on each axis of the space for a problem on a CPU, the one to try first in front."""

from dataclasses import dataclass
from math import ceil

from gemm_tuner.domain.blocking import NEAR_BYTES, LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.micro_kernel import Can, MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.grouped import UNKNOWN_L2_BYTES, depths_of_groups
from gemm_tuner.space.parts import largest_part

UNROLLS = (1, 2, 4)
# Of a row of x; the first two are tried first. A tile of AMX reads whole rows of a block from L1.
_KC_TARGETS_BYTES = (8192, 2048, 1024, 4096)
_KC_TARGETS_OF_TILES_BYTES = _KC_TARGETS_BYTES[1:]
_PREFETCHES_BYTES = (0, 4096, 8192, 16384)
# So few rows of x leave the core waiting for weights, which may be fetched just before their use.
_MOST_ROWS_THAT_FETCH_NEAR = 2
# Each tile fetches a cache line in every step of k at most.
_LEAST_TILES_THAT_FETCH = 8
# k is cut for several threads only if y has few tiles for each, and a slice of k is worth it.
_FEW_TILES_PER_THREAD = 64
_LEAST_SLICE_OF_K = 256
# To write the sums of a slice and add them to the others takes as long as so many steps of k, and
# the second phase a little more: measured on an EPYC 9004.
_STEPS_PER_SUM = 8
_SLICES_COST = 1.03
# A core multiplies about so many elements while it reads one of x or w, in f32 as in bf16 and
# bytes: between the rates of L3, which the parts share, and of memory, of Zen 4 in cores.csv.
_PRODUCTS_PER_READ = 4
_FEWEST_ROWS_TO_SHUFFLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values on each axis for a problem on a CPU with a number of threads.

    With `like`, a candidate for the same layer with any m, those that leave its packed weights.
    """

    problem: Problem
    cpu: Cpu
    threads: int = 1
    like: Candidate | None = None

    def kcs(self, family: MicroKernelFamily) -> tuple[int, ...]:
        """Return the depths of a block of k, the first to be tried first."""
        k = max(1, self.problem.k)
        if family.layout is PackedLayout.GROUPS:
            return depths_of_groups(self.problem, family)
        if family.layout is not PackedLayout.PANELS:
            return (k,)
        whole = round_up(k, family.k_multiple)
        if self.like is not None:
            kc = self.like.blocking.kc
            return (kc if kc < k and kc % family.k_multiple == 0 else whole,)
        if not (self.problem.types.y_holds_sums or family.k_tile):
            # Between blocks of k, sums would go through the workspace, which does not pay.
            return (whole,)
        targets_bytes = _KC_TARGETS_OF_TILES_BYTES if family.k_tile else _KC_TARGETS_BYTES
        targets = [target // self.problem.types.x.size_bytes for target in targets_bytes]
        # Blocks of even depth, so that the last is not a sliver.
        first, second, *others = (
            round_up(ceil(k / ceil(k / target)), max(16, family.k_multiple))
            if target < k
            else whole
            for target in targets
        )
        return tuple(dict.fromkeys([first, second, whole, *others]))

    def prefetches(self, family: MicroKernelFamily) -> tuple[int, ...]:
        """Return how far ahead in the stream of weights to fetch, in bytes."""
        if self.problem.w_bytes <= self.cpu.caches.l1d_bytes:
            return _PREFETCHES_BYTES[:1]
        return (
            (*_PREFETCHES_BYTES, NEAR_BYTES) if self.can_fetch_near(family) else _PREFETCHES_BYTES
        )

    def can_fetch_near(self, family: MicroKernelFamily) -> bool:
        """Return whether few rows wait for weights that are not in L2."""
        return (
            Can.FETCH_NEAR in family.can
            and self.problem.m.high <= _MOST_ROWS_THAT_FETCH_NEAR
            and self.problem.w_bytes > self.cpu.caches.l2_bytes
        )

    def can_fetch_panels(
        self,
        family: MicroKernelFamily,
        mr: int,
        nr: int,
        blocks: tuple[int, int, int, LoopOrder],
        *,
        convert_once: bool,
    ) -> bool:
        """Return whether the next panel can be fetched, with blocks of mc and kc in an order.

        Tiles fetch a part of it each, so every part of a call must have a whole block of rows;
        where a panel is converted once, the next is fetched meanwhile.
        """
        grid_m, mc, kc, order = blocks
        caches, weights = self.cpu.caches, self.problem.types.w
        tiles_fetch = (
            Can.FETCH_NEXT_PANEL in family.can
            and not order.is_ir_outer
            and mc // mr >= max(_LEAST_TILES_THAT_FETCH, nr // family.lanes)
            and mc - mr < self.problem.m.low // grid_m
        )
        return (
            (tiles_fetch or convert_once)
            and caches.l2_bytes < self.problem.w_bytes
            and weights.row_bytes(nr * kc) <= (caches.l2_bytes or UNKNOWN_L2_BYTES) // 2
        )

    def w_streams(self, family: MicroKernelFamily, nr: int) -> tuple[int, ...]:
        """Return how many panels a tile may read side by side."""
        can_split = Can.READ_PANELS_SIDE_BY_SIDE in family.can and nr % (2 * family.lanes) == 0
        streams_weights = self.problem.w_bytes > self.cpu.caches.l2_bytes
        return (1, 2) if can_split and streams_weights and self.problem.m.high == 1 else (1,)

    def shuffles(self, family: MicroKernelFamily, mr: int, nr: int) -> tuple[bool, ...]:
        """Return whether x may be read by shuffles, the first to be tried first.

        Only a tile of one vector waits for loads, of which it has one for each multiplication.
        """
        waits_for_loads = nr == family.lanes and mr >= _FEWEST_ROWS_TO_SHUFFLE
        fits = mr + ceil(mr / 4) + 2 <= family.registers
        if not (waits_for_loads and fits) or not family.can_shuffle(self.problem.types.x):
            return (False,)
        return (True, False)

    def streams_y(self, family: MicroKernelFamily, kc: int) -> tuple[bool, ...]:
        """Return whether y may be written past the caches, the first to be tried first.

        Only a y that L3 cannot keep for its reader, and that is written once.
        """
        y_bytes = self.problem.m.high * self.problem.types.y.row_bytes(self.problem.n)
        is_large = y_bytes >= self.cpu.caches.l3_bytes > 0
        can_stream = family.can_stream(self.problem.types.y) and kc >= self.problem.k
        return (True, False) if is_large and can_stream else (False,)

    def grids(
        self, family: MicroKernelFamily, mr: int, nr: int
    ) -> tuple[tuple[int, int, int], ...]:
        """Return the ways to cut a call, the one to try first in front; one part is the last.

        Of those that do not cut k, it is the one whose largest part takes the least time. Slices
        of k are as large as each other: they come before the others where those are uneven.
        """
        tiles = ceil(self.problem.m.high / mr)
        panels = ceil(self.problem.n / nr)
        fitting = [
            (m, n, k)
            for k in _divisors(self.threads)
            if k == 1 or self._is_worth_slicing(family, tiles * panels, k)
            for n in reversed(_divisors(self.threads // k))
            if n <= panels and (m := self.threads // k // n) <= tiles
        ]

        def sizes(grid: tuple[int, int, int]) -> tuple[int, int]:
            rows = largest_part(self.problem.m.high, mr, grid[0])
            return rows, round_up(largest_part(self.problem.n, nr, grid[1]), family.lanes)

        def products(grid: tuple[int, int, int]) -> float:
            rows, columns = sizes(grid)
            if grid[2] == 1:
                return rows * columns * self.problem.k
            steps = self.problem.k / grid[2] + _STEPS_PER_SUM * family.k_step
            return _SLICES_COST * rows * columns * steps

        def cost(grid: tuple[int, int, int]) -> float:
            return products(grid) + _PRODUCTS_PER_READ * sum(sizes(grid)) * self.problem.k / grid[2]

        whole = sorted((grid for grid in fitting if grid[2] == 1), key=cost)
        slices = sorted((grid for grid in fitting if grid[2] > 1), key=cost)
        even = [grid for grid in slices if whole and products(grid) < products(whole[0])]
        return tuple(dict.fromkeys([*even, *whole, *slices, (1, 1, 1)]))

    def _is_worth_slicing(self, family: MicroKernelFamily, tiles: int, slices: int) -> bool:
        """Return whether the sums of `tiles` may be computed in slices of k by several threads."""
        k = self.problem.k
        return (
            family.layout is PackedLayout.PANELS
            and tiles <= _FEW_TILES_PER_THREAD * self.threads
            and k >= _LEAST_SLICE_OF_K * slices
            and ceil(k / self.depth_of_slice(family, slices)) == slices
        )

    def depth_of_slice(self, family: MicroKernelFamily, slices: int) -> int:
        """Return the depth of each of some slices of k, in whole steps."""
        return round_up(ceil(self.problem.k / slices), max(16, family.k_multiple))

    def depth_in_slices(self, family: MicroKernelFamily, kc: int, slices: int) -> int:
        """Return kc, or the depth of the even blocks of about kc that make up each slice of k."""
        if slices == 1:
            return kc
        slice_depth = self.depth_of_slice(family, slices)
        return round_up(ceil(slice_depth / ceil(slice_depth / kc)), max(16, family.k_multiple))


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is not below a value."""
    return ceil(value / multiple) * multiple


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(one for one in range(1, number + 1) if number % one == 0)
