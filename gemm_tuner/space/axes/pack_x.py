"""Whether each block of x is copied to contiguous rows first.

With and without: copied rows do not share L1 sets, and halves that are multiplied as floats, or
bytes as words, are converted once for all panels. Never for x in fixed point, a copy already.

Tried first: packed where more than four rows share L1 sets (eight where these have twelve ways) and
meet 1024 columns or more, or are converted for four panels or more. With AMX also where so many of
a tile share L1 sets, in longer rows than 4 KB, and where x ends inside a tile, which each panel
would copy; not where x is read once.
"""

from math import ceil, gcd

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.domain.micro_kernel import Can, MicroKernel, MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.axis import Axis, Refusal
from gemm_tuner.space.choice import Choice
from gemm_tuner.space.tile import Tile

# So few rows of x wait for their weights.
_FEW_ROWS = 4
# From so many columns on, multiplying a packed x takes far longer than packing it.
_MANY_COLUMNS = 1024
_L1_SET_STRIDE_BYTES = 4096  # rows at multiples of it share sets
_WAYS_OF_OTHERS = 4
_MANY_PANELS = 4  # from so many on, x is converted once for all


def _choices(_tile: Tile, _choice: Choice) -> tuple[bool, ...]:
    return (False, True)


def _refusal(
    _problem: Problem, family: MicroKernelFamily, _tile: MicroKernel, blocking: Blocking
) -> Refusal | None:
    return Refusal(what="pack_x") if blocking.pack_x and family.is_in_fixed_point else None


def _first(tile: Tile, choice: Choice) -> Choice:
    return choice.having(pack_x=_gains(tile))


def _gains(tile: Tile) -> bool:
    """Return whether a copy promises more than it costs.

    It does if rows, dense, share L1 sets, and in registers of one row are not few and meet many
    columns; if rows are not few and are converted for several panels; or if x ends in a part of a
    tile and there are no fewer panels than tiles along k.
    """
    problem, family = tile.problem, tile.family
    panels = ceil(problem.n / tile.nr)
    has_rows, is_wide = problem.m.high > _FEW_ROWS, problem.n >= _MANY_COLUMNS
    if has_rows and family.packed_x(problem.types.x) and panels >= _MANY_PANELS:
        return True
    # Each row takes a way of the sets that they share; weights and y need the rest.
    ways = tile.cpu.caches.l1d_bytes // _L1_SET_STRIDE_BYTES
    is_reused = problem.m.high > max(_FEW_ROWS, ways - _WAYS_OF_OTHERS) and is_wide
    broadcasts = Can.BROADCAST_X in family.can
    if family.register_rows == 1 and not (broadcasts and is_reused):
        return False
    if tile.passes_x_once:
        return False
    row_bytes = problem.types.x.row_bytes(problem.k)
    ends_in_part = family.k_tile > 0 and problem.k % family.k_tile > 0
    # Rows of a tile of AMX that meet in fewer sets than have room for them.
    in_same_sets = tile.mr * gcd(row_bytes, _L1_SET_STRIDE_BYTES) // _L1_SET_STRIDE_BYTES
    if family.k_tile and row_bytes > _L1_SET_STRIDE_BYTES and in_same_sets >= ways:
        return True
    return (row_bytes > 0 and row_bytes % _L1_SET_STRIDE_BYTES == 0) or (
        ends_in_part and ceil(problem.k / family.k_tile) <= panels
    )


AXIS = Axis(fields=("pack_x",), choices=_choices, refusal=_refusal, first=_first)
