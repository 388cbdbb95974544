"""No search: the candidates that somebody chose."""

from collections.abc import Iterable

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.strategies.strategy import Batch, Line, Speeds


class Chosen:
    """Propose the candidates that somebody chose, and no others."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._line = Line(candidates)

    def propose(self, _speeds: Speeds) -> Batch:
        """Return the next of those chosen."""
        return self._line.next_batch()

    @property
    def pending(self) -> int:
        """Return how many candidates are still in line."""
        return len(self._line)
