"""The candidates of a problem that are recorded: a part of its space that searches can walk in.

Half of them are first choices of tiles, taken at even distances from the model's order. The others
surround a few of these: what is one step away from each, and then two, at even distances too.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest
from typing import TypeVar

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist

MOST = 60
_CENTRES = 3
_SHARE_OF_FIRST_STEPS = 2 / 3

Item = TypeVar("Item")


def grid(spaces: Sequence[Space], most: int = MOST) -> list[Candidate]:
    """Return at most so many candidates of a problem, the first choices of tiles first.

    Args:
        spaces: of the problem, one for each regime that will be timed.
        most: how many candidates there may be.

    Raises:
        NoKernelFamily: no family of the catalog covers the problem on this CPU.
    """
    in_turn = chain.from_iterable(zip_longest(*map(shortlist, spaces)))
    first = [one for one in dict.fromkeys(in_turn) if one]
    found = dict.fromkeys(evenly(first, (most + 1) // 2))
    centres = list(found)[: max(1, len(found) // 2)]
    for place, centre in enumerate(evenly(centres, _CENTRES)):
        share = (most - len(found)) // (min(_CENTRES, len(centres)) - place)
        near = _new(spaces[0].neighbours(centre), found)
        steps = evenly(near, int(share * _SHARE_OF_FIRST_STEPS) or share)
        found |= dict.fromkeys(steps)
        two_steps = chain.from_iterable(map(spaces[0].neighbours, steps))
        found |= dict.fromkeys(evenly(_new(two_steps, found), share - len(steps)))
    # Where steps are few, the rest are first choices.
    rest = islice(_new(first, found), max(0, most - len(found)))
    return [*found, *rest]


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` items at even distances, the first among them; all if they are no more."""
    if len(items) <= count:
        return list(items)
    return [items[place * len(items) // count] for place in range(count)]


def _new(candidates: Iterable[Candidate], known: Iterable[Candidate]) -> list[Candidate]:
    known = set(known)
    return [one for one in dict.fromkeys(candidates) if one not in known]
