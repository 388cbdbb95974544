"""Of the next block of packed weights, what tiles of AMX fetch while they multiply one."""

from math import ceil

from gemm_tuner.domain.blocking import Blocking

_LINES_OF_TILE = 16
# A core has 16 buffers for what comes to L1 (Intel, Golden Cove), and tiles from L2 need them, too.
# More than three lines of each tile that is multiplied leave too few: measured, decision 100.
_MOST_LINES = 3


def next_lines(rows: int, mr: int, blocking: Blocking) -> int:
    """Return how many cache lines of each tile of the next block are fetched in a turn.

    Of `rows` in a call, tiles of `mr` meet a block, each of which fetches another part. A tile
    alone fetches nothing, and so do more tiles than a tile of weights has lines.
    """
    of_part = ceil(rows / blocking.grid_m)
    of_block = of_part if blocking.loop_order.is_jc_outer else min(of_part, blocking.mc)
    return lines_of_tiles(ceil(of_block / mr))


def lines_of_tiles(tiles: int) -> int:
    """Return the same for so many tiles of rows that meet a block."""
    return min(_MOST_LINES, _LINES_OF_TILE // tiles) if tiles > 1 else 0
