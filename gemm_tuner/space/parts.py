"""The parts that the threads of a call compute, as kernels cut them."""

from itertools import pairwise
from math import ceil


def largest_part(count: int, step: int, ways: int) -> int:
    """Return how many of `count` rows or columns the largest of some parts has.

    Parts begin at whole tiles, which are `step` rows or columns.
    """
    tiles = ceil(count / step)
    bounds = [min(count, tiles * part // ways * step) for part in range(ways + 1)]
    return max(end - begin for begin, end in pairwise(bounds))
