"""The order in which candidates are tried: the model's favourites, then neighbours of the best.

The same measurements lead to the same order: nothing here is random.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Protocol

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist

BATCH = 8
FAVOURITES = 24
EXPANDED = 2
NOTABLE_GAIN = 1.005


class Strategy(Protocol):
    """A source of candidates, batch after batch."""

    def next_batch(self, speeds: Mapping[Candidate, float]) -> list[Candidate]:
        """Return the candidates to try next, none when the search is over.

        Args:
            speeds: what was measured so far, greater is better; candidates that failed are absent.
        """

    @property
    def pending(self) -> int:
        """Return how many candidates are already in line."""


class Chosen:
    """Propose the candidates that somebody chose, and no others."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._queue = list(dict.fromkeys(candidates))

    def next_batch(self, _speeds: Mapping[Candidate, float]) -> list[Candidate]:
        """Return the next of those chosen."""
        batch, self._queue = self._queue[:BATCH], self._queue[BATCH:]
        return batch

    @property
    def pending(self) -> int:
        """Return how many candidates are still in line."""
        return len(self._queue)


class LocalSearch:
    """Propose candidates in batches until the neighbours of the best bring nothing.

    `seeds` are tried before the model's favourites, and `elsewhere` in turn with them: the best of
    another regime, for instance.
    """

    def __init__(
        self, space: Space, *, seeds: Sequence[Candidate] = (), elsewhere: Sequence[Candidate] = ()
    ) -> None:
        self._space = space
        in_turn = chain.from_iterable(zip_longest(elsewhere, shortlist(space, FAVOURITES)))
        self._queue = list(dict.fromkeys([*seeds, *(one for one in in_turn if one)]))
        self._proposed: set[Candidate] = set()
        self._expanded: set[Candidate] = set()
        self._best_before = 0.0

    def next_batch(self, speeds: Mapping[Candidate, float]) -> list[Candidate]:
        """Return the next in line, or the neighbours of the best."""
        if not self._queue:
            self._expand(speeds)
        batch, self._queue = self._queue[:BATCH], self._queue[BATCH:]
        self._proposed.update(batch)
        return batch

    @property
    def pending(self) -> int:
        """Return how many candidates are already in line."""
        return len(self._queue)

    def _expand(self, speeds: Mapping[Candidate, float]) -> None:
        ranked = sorted(speeds, key=lambda candidate: (-speeds[candidate], candidate.text))
        best = speeds[ranked[0]] if ranked else 0.0
        if best < self._best_before * NOTABLE_GAIN:
            return
        self._best_before = best
        for candidate in [one for one in ranked if one not in self._expanded][:EXPANDED]:
            self._expanded.add(candidate)
            self._queue += [
                neighbour
                for neighbour in self._space.neighbours(candidate)
                if neighbour not in self._proposed and neighbour not in self._queue
            ]


def make_strategy(
    space: Space,
    seeds: Sequence[Candidate],
    *,
    elsewhere: Sequence[Candidate],
    chosen: Sequence[Candidate],
) -> Strategy:
    """Return a search of the space, or, where candidates were chosen, these and no search."""
    return Chosen(chosen) if chosen else LocalSearch(space, seeds=seeds, elsewhere=elsewhere)
