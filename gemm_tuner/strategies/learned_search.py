"""Candidates in the order of a learned ranker, and neighbours of those that prove fast."""

from collections.abc import Iterable, Sequence

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.space.candidates import Space
from gemm_tuner.strategies.ranker import Ranker
from gemm_tuner.strategies.strategy import BATCH, NOTABLE_GAIN, Batch, Speeds, ranked

_BEST = 8  # of a look at the space: their neighbours are looked at next
_LOOKS = 2
_IN_VAIN = 3


class LearnedSearch:
    """Propose the candidates that a ranker expects to be fastest, the `seeds` first.

    It looks at the first choices of all tiles, and twice at neighbours of what it ranks best. After
    each batch, the neighbours of the best that was measured join. It is over when three batches
    bring less than half a percent.
    """

    def __init__(self, space: Space, *, ranker: Ranker, seeds: Sequence[Candidate] = ()) -> None:
        self._space = space
        self._ranker = ranker
        self._seeds = list(dict.fromkeys(seeds))
        self._known = set(self._seeds)
        self._costs: dict[Candidate, float] = {}
        self._expanded: set[Candidate] = set()
        self._best_before = 0.0
        self._in_vain = 0
        self._look_at(space.defaults())
        for _look in range(_LOOKS):
            for candidate in self._order()[:_BEST]:
                self._expand(candidate)

    def propose(self, speeds: Speeds) -> Batch:
        """Return the best that the ranker knows and that were not proposed yet."""
        best = max(speeds.values(), default=0.0)
        if speeds:
            is_gain = best >= self._best_before * NOTABLE_GAIN
            self._in_vain = 0 if is_gain else self._in_vain + 1
            self._best_before = max(best, self._best_before)
            self._expand(ranked(speeds)[0])
        if self._in_vain >= _IN_VAIN:
            return Batch(candidates=())
        batch = [*self._seeds, *self._order()][:BATCH]
        self._seeds = self._seeds[BATCH:]
        for candidate in batch:
            self._costs.pop(candidate, None)
        return Batch(candidates=tuple(batch))

    @property
    def pending(self) -> int:
        """Return how many candidates are in line."""
        return len(self._seeds) + len(self._costs)

    def _order(self) -> list[Candidate]:
        return sorted(self._costs, key=lambda one: (self._costs[one], one.text))

    def _expand(self, candidate: Candidate) -> None:
        if candidate not in self._expanded:
            self._expanded.add(candidate)
            self._look_at(self._space.neighbours(candidate))

    def _look_at(self, candidates: Iterable[Candidate]) -> None:
        new = [one for one in dict.fromkeys(candidates) if one not in self._known]
        self._known.update(new)
        self._costs |= self._ranker.costs(self._space, new)
