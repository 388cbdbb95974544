"""The model's favourites, and beside them neighbours of the fastest so far.

The same measurements lead to the same order: nothing here is random.
"""

from collections.abc import Sequence
from itertools import chain, zip_longest

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.strategies.strategy import BATCH, NOTABLE_GAIN, Batch, Speeds, ranked

FAVOURITES = 24
# Of a batch; the others are favourites, as long as there are any.
_NEIGHBOURS = 6
# So many of the fastest are gone on from, each once: which is the fastest, a race of a few samples
# does not know.
_CENTRES = 8
_IN_VAIN = 6


class LocalSearch:
    """Propose candidates in batches until six in turn bring less than half a percent.

    The first batch is of favourites of the model. Each that follows has six neighbours of the
    fastest so far, and two favourites. `seeds` are tried before the favourites, and `elsewhere` in
    turn with them: the best of another regime, for instance.
    """

    def __init__(
        self, space: Space, *, seeds: Sequence[Candidate] = (), elsewhere: Sequence[Candidate] = ()
    ) -> None:
        self._space = space
        in_turn = chain.from_iterable(zip_longest(elsewhere, shortlist(space, FAVOURITES)))
        self._favourites = [*seeds, *(one for one in in_turn if one)]
        self._neighbours: list[Candidate] = []
        self._proposed: set[Candidate] = set()
        self._expanded: set[Candidate] = set()
        self._best_before = 0.0
        self._in_vain = 0

    def propose(self, speeds: Speeds) -> Batch:
        """Return the next neighbours and favourites, none when the search is over."""
        best = max(speeds.values(), default=0.0)
        self._in_vain = 0 if best >= self._best_before * NOTABLE_GAIN else self._in_vain + 1
        self._best_before = max(best, self._best_before)
        self._expand(speeds)
        if self._in_vain >= _IN_VAIN and not self._favourites:
            return Batch(candidates=())
        near = self._take(self._neighbours, _NEIGHBOURS)
        first = self._take(self._favourites, BATCH - len(near))
        rest = self._take(self._neighbours, BATCH - len(near) - len(first))
        return Batch(candidates=(*near, *first, *rest))

    @property
    def pending(self) -> int:
        """Return how many candidates are already in line."""
        return len(self._favourites) + len(self._neighbours)

    def _expand(self, speeds: Speeds) -> None:
        """Put the neighbours of the fastest in front, or, where none are left, of the next."""
        for place, centre in enumerate(ranked(speeds)[:_CENTRES]):
            if place > 0 and self._neighbours:
                return
            if centre not in self._expanded:
                self._expanded.add(centre)
                near = (one for one in self._space.neighbours(centre) if one not in self._proposed)
                self._neighbours[:0] = near

    def _take(self, line: list[Candidate], count: int) -> list[Candidate]:
        """Take the next of a line that were never proposed, at most so many."""
        taken: list[Candidate] = []
        while line and len(taken) < count:
            candidate = line.pop(0)
            if candidate not in self._proposed:
                self._proposed.add(candidate)
                taken.append(candidate)
        return taken
