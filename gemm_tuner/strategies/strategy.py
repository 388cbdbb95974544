"""What a strategy is: it proposes candidates and is told how fast they were.

It knows nothing of compilers and clocks. A sweep drives it, and so does a replay.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from gemm_tuner.domain.candidate import Candidate

BATCH = 8
NOTABLE_GAIN = 1.005

Speeds = Mapping[Candidate, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Candidates to try together; none when a search is over.

    With a `sample_factor` above 1, they are timed again if they were before, with so many times the
    samples.
    """

    candidates: tuple[Candidate, ...]
    sample_factor: int = 1


class Strategy(Protocol):
    """A source of candidates, batch after batch."""

    def propose(self, speeds: Speeds) -> Batch:
        """Return the candidates to try next, none when the search is over.

        Args:
            speeds: what was measured so far, greater is better; candidates that failed are absent.
        """

    @property
    def pending(self) -> int:
        """Return how many candidates are already in line."""


class Line:
    """Candidates in line, each of which stands there once and never again."""

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        """Put some in line."""
        self._seen: dict[Candidate, None] = {}
        self._waiting: list[Candidate] = []
        self.add(candidates)

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def __contains__(self, candidate: Candidate) -> bool:
        """Return whether a candidate is or was in line."""
        return candidate in self._seen

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Put those that never were in line at its end."""
        for candidate in candidates:
            if candidate not in self._seen:
                self._seen[candidate] = None
                self._waiting.append(candidate)

    def next_batch(self) -> Batch:
        """Return the next in line."""
        batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
        return Batch(candidates=tuple(batch))


def ranked(speeds: Speeds) -> list[Candidate]:
    """Return what was measured, the fastest first; of equals, the first by its text."""
    return sorted(speeds, key=lambda candidate: (-speeds[candidate], candidate.text))
