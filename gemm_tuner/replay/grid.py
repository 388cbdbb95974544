"""The candidates of a problem that are recorded: what a search meets there, and some more.

First come the model's favourites, as many as a search begins with, and tiles at even distances
behind them. What is one step from the fastest of these follows, and then from the fastest of all:
the recorder measures, and asks for more until there are enough.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest
from typing import TypeVar

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.strategies.local_search import FAVOURITES

MOST = 64
# Of all candidates; the others are beside the fastest.
_SHARE_OF_FAVOURITES = 3 / 8
_SHARE_BEHIND_THEM = 1 / 8

Item = TypeVar("Item")


def favourites(spaces: Sequence[Space], most: int = MOST) -> list[Candidate]:
    """Return what is recorded first of a grid of at most so many candidates of a problem.

    Args:
        spaces: of the problem, one for each regime that will be timed.
        most: how many candidates the grid may have.

    Raises:
        NoKernelFamily: no family of the catalog covers the problem on this CPU.
    """
    first = _first_choices(spaces)
    count = min(FAVOURITES, max(1, round(_SHARE_OF_FAVOURITES * most)))
    return [*first[:count], *evenly(first[count:], round(_SHARE_BEHIND_THEM * most))]


def beside(
    space: Space, centres: Iterable[Candidate], known: Iterable[Candidate], most: int
) -> list[Candidate]:
    """Return at most so many unknown candidates that are one step from the centres."""
    unknown = _new(chain.from_iterable(map(space.neighbours, centres)), known)
    return evenly(unknown, most)


def others(spaces: Sequence[Space], known: Iterable[Candidate], most: int) -> list[Candidate]:
    """Return at most so many first choices of tiles that are not known, in the model's order."""
    return list(islice(_new(_first_choices(spaces), known), most))


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` items at even distances, the first among them; all if they are no more."""
    if len(items) <= count:
        return list(items)
    return [items[place * len(items) // count] for place in range(count)]


def _first_choices(spaces: Sequence[Space]) -> list[Candidate]:
    """Return the first choices of tiles in all regimes, the model's favourites first."""
    in_turn = chain.from_iterable(zip_longest(*map(shortlist, spaces)))
    return [one for one in dict.fromkeys(in_turn) if one]


def _new(candidates: Iterable[Candidate], known: Iterable[Candidate]) -> list[Candidate]:
    known = set(known)
    return [one for one in dict.fromkeys(candidates) if one not in known]
