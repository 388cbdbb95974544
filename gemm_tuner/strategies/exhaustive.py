"""All candidates that there are, tile after tile."""

from collections.abc import Sequence
from itertools import islice

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.space.candidates import Space
from gemm_tuner.strategies.strategy import BATCH, Batch, Line, Speeds


class Exhaustive:
    """Propose every candidate of a space, the `seeds` first. It is over when there are no more."""

    def __init__(self, space: Space, *, seeds: Sequence[Candidate] = ()) -> None:
        self._line = Line(seeds)
        self._rest = space.all()
        self._left = space.size()

    def propose(self, _speeds: Speeds) -> Batch:
        """Return the next ones."""
        while len(self._line) < BATCH and (more := list(islice(self._rest, BATCH))):
            self._line.add(more)
        batch = self._line.next_batch()
        self._left -= len(batch.candidates)
        return batch

    @property
    def pending(self) -> int:
        """Return how many candidates are left, whatever their format."""
        return max(len(self._line), self._left)
