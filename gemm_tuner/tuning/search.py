"""The order in which candidates are tried: the model's favourites, then neighbours of the best.

The same measurements lead to the same order: nothing here is random.
"""

from collections.abc import Mapping, Sequence

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import predict_cycles

BATCH = 8
FAVOURITES = 24
EXPANDED = 2
NOTABLE_GAIN = 1.005


class LocalSearch:
    """Propose candidates in batches until the neighbours of the best bring nothing.

    `seeds` are tried before the model's favourites: the best of another regime, for instance.
    """

    def __init__(self, space: Space, *, seeds: Sequence[Candidate] = ()) -> None:
        self._space = space
        self._queue = list(dict.fromkeys([*seeds, *_favourites(space, FAVOURITES)]))
        self._proposed: set[Candidate] = set()
        self._expanded: set[Candidate] = set()
        self._best_before = 0.0

    def next_batch(self, speeds: Mapping[Candidate, float]) -> list[Candidate]:
        """Return the candidates to try next, none when the search is over.

        Args:
            speeds: what was measured so far, greater is better; candidates that failed are absent.
        """
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


def _favourites(space: Space, count: int) -> list[Candidate]:
    """Return the default candidates of the tiles that the model ranks first."""

    def predicted(candidate: Candidate) -> tuple[float, str]:
        family = family_named(candidate.micro_kernel.family)
        return predict_cycles(space.problem, candidate, family, space.cpu), candidate.text

    return sorted(space.defaults(), key=predicted)[:count]
