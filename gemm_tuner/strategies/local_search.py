"""The model's favourites, then neighbours of the best.

The same measurements lead to the same order: nothing here is random.
"""

from collections.abc import Sequence
from itertools import chain, zip_longest

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.strategies.strategy import NOTABLE_GAIN, Batch, Line, Speeds, ranked

FAVOURITES = 24
EXPANDED = 2


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
        self._line = Line([*seeds, *(one for one in in_turn if one)])
        self._expanded: set[Candidate] = set()
        self._best_before = 0.0

    def propose(self, speeds: Speeds) -> Batch:
        """Return the next in line, or the neighbours of the best."""
        if not self._line:
            self._expand(speeds)
        return self._line.next_batch()

    @property
    def pending(self) -> int:
        """Return how many candidates are already in line."""
        return len(self._line)

    def _expand(self, speeds: Speeds) -> None:
        order = ranked(speeds)
        best = speeds[order[0]] if order else 0.0
        if best < self._best_before * NOTABLE_GAIN:
            return
        self._best_before = best
        for candidate in [one for one in order if one not in self._expanded][:EXPANDED]:
            self._expanded.add(candidate)
            self._line.add(self._space.neighbours(candidate))
