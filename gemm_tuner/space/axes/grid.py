"""How many parts of a call can run at the same time, along m, n and k.

With several threads, every cut of rows and columns of tiles into enough parts. Where y has few
tiles, slices of k too: a second phase adds up their sums. One part is always possible. A fixed
order of additions has no slices of k, but of integers. Attention is cut along m, and along its keys
where there are fewer tiles of queries than threads: a second phase brings slices of keys together.

Tried first: the cut whose largest part has the least to multiply and to read. Slices of k where the
other cuts are uneven by more than slices cost.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import ceil

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import Additions, MicroKernel, MicroKernelFamily, PackedLayout
from gemm_tuner.domain.packed_format import needs_column_sums
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axes.kc import depth_of_slice, depths
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.parts import largest_part
from gemm_tuner.space.tile import Tile, round_up

Grid = tuple[int, int, int]

_LEAST_SLICE_OF_KEYS = 128
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


@lru_cache(maxsize=1024)
def grids(tile: Tile) -> tuple[Grid, ...]:
    """Return the ways to cut a call, the one to try first in front; one part is the last.

    Of those that do not cut k, it is the one whose largest part takes the least time. Slices of k
    are as large as each other: they come before the others where those are uneven.
    """
    fitting = list(_fitting(tile))
    whole = sorted((grid for grid in fitting if grid[2] == 1), key=_cost(tile))
    slices = sorted((grid for grid in fitting if grid[2] > 1), key=_cost(tile))
    least = _products(tile, whole[0]) if whole else 0.0
    even = [grid for grid in slices if _products(tile, grid) < least]
    return tuple(dict.fromkeys([*even, *whole, *slices, (1, 1, 1)]))


def _fitting(tile: Tile) -> Iterator[Grid]:
    """Yield the cuts into as many parts as there are threads, with a tile for each part."""
    tiles = ceil(tile.problem.m.high / tile.mr)
    panels = ceil(tile.problem.n / tile.nr)
    if tile.problem.operation.has_values:
        # Sums of the values wait in memory, and rows of queries alone need none.
        slices = tile.problem.n // _LEAST_SLICE_OF_KEYS if tiles < tile.threads else 1
        panels = max(1, min(panels, slices))
    for k in _divisors(tile.threads):
        if k == 1 or _is_worth_slicing(tile, tiles * panels, k):
            for n in reversed(_divisors(tile.threads // k)):
                m = tile.threads // k // n
                if n <= panels and m <= tiles:
                    yield m, n, k


def _is_worth_slicing(tile: Tile, tiles: int, slices: int) -> bool:
    """Return whether the sums of `tiles` may be computed in slices of k by several threads."""
    k = tile.problem.k
    return (
        not tile.problem.operation.has_values
        and tile.family.layout is PackedLayout.PANELS
        and not _refuses_slices(tile.problem, tile.family)
        and tiles <= _FEW_TILES_PER_THREAD * tile.threads
        and k >= _LEAST_SLICE_OF_K * slices
        and ceil(k / depth_of_slice(tile, slices)) == slices
    )


def _refuses_slices(problem: Problem, family: MicroKernelFamily) -> bool:
    """Return whether slices of k would be added in another order than the fixed one.

    Or whether they need sums of whole columns of w, of which each packs a slice in the call.
    """
    sums_slices = not problem.operation.packs_ahead and needs_column_sums(problem, family)
    return sums_slices or (problem.is_fixed and family.additions is not Additions.EXACT)


def _refusal(
    problem: Problem, family: MicroKernelFamily, _tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    if blocking.grid_k > 1 and _refuses_slices(problem, family):
        why = (
            "a fixed order of additions" if problem.is_fixed else "offsets of x, and w in the call"
        )
        return Refusal(what=f"grid of {blocking.grid_k} slices of k with {why}")
    return None


def _sizes(tile: Tile, grid: Grid) -> tuple[int, int]:
    """Return the rows and columns of the largest part, in whole vectors."""
    rows = largest_part(tile.problem.m.high, tile.mr, grid[0])
    columns = largest_part(tile.problem.n, tile.nr, grid[1])
    return rows, round_up(columns, tile.family.lanes)


def _products(tile: Tile, grid: Grid) -> float:
    """Return the multiplications of the largest part, and what bringing slices together costs."""
    rows, columns = _sizes(tile, grid)
    if grid[2] == 1:
        return rows * columns * tile.problem.k
    steps = tile.problem.k / grid[2] + _STEPS_PER_SUM * tile.family.k_step
    return _SLICES_COST * rows * columns * steps


def _cost(tile: Tile) -> Callable[[Grid], float]:
    """Return the cost of the largest part of a grid: its products and its reads."""

    def cost(grid: Grid) -> float:
        read = sum(_sizes(tile, grid)) * tile.problem.k / grid[2]
        return _products(tile, grid) + _PRODUCTS_PER_READ * read

    return cost


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(one for one in range(1, number + 1) if number % one == 0)


def _choices(tile: Tile, _choice: Choice) -> tuple[Grid, ...]:
    return grids(tile)


def _moves(tile: Tile, choice: Choice) -> Iterator[Choice]:
    """Yield each grid, with blocks of k that are not those of other slices."""
    depth, *others = depths(tile)
    kc = choice.kc if choice.kc in others else depth
    for m, n, k in grids(tile):
        yield choice.having(kc=kc, grid_m=m, grid_n=n, grid_k=k)


AXIS = Axis(
    fields=("grid_m", "grid_n", "grid_k"),
    choices=_choices,
    refusal=_refusal,
    moves=_moves,
    of_attention=True,
)
