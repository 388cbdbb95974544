"""Samples that a neighbour of a shared machine slowed are taken again."""

from collections.abc import Callable
from time import sleep
from typing import TypeVar

from gemm_tuner.domain.doubt import SLOWED

_TURNS = 4
_PAUSE_S = 0.3

_Sample = TypeVar("_Sample")


def taken_calmly(
    take: Callable[[], _Sample], time_of: Callable[[_Sample], float], fastest: float
) -> _Sample:
    """Return a sample that takes at most `SLOWED` times the fastest; after four turns, the best.

    The time alone decides, never what it is compared with. Of what is uneven by itself, the faster
    calls count.
    """
    best = take()
    for _turn in range(_TURNS - 1):
        if time_of(best) <= SLOWED * fastest:
            break
        sleep(_PAUSE_S)
        best = min(best, take(), key=time_of)
    return best
