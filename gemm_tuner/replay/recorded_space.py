"""The part of a space that was recorded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import NoKernelFamily
from gemm_tuner.replay.recording import Recording
from gemm_tuner.space.candidates import Space


@dataclass(frozen=True, kw_only=True)
class RecordedSpace(Space):
    """A space in which there is nothing but what was recorded.

    What it has computed it keeps: many searches walk in it.
    """

    recorded: tuple[Candidate, ...]
    _near: dict[Candidate, list[Candidate]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, recording: Recording) -> "RecordedSpace":
        """Return the space of a recording."""
        return cls(
            problem=Problem.parse(recording.problem),
            cpu=recording.cpu.to_domain(),
            threads=recording.threads,
            regime=recording.regime,
            recorded=tuple(one.candidate for one in recording.candidates),
        )

    def __contains__(self, candidate: Candidate) -> bool:
        """Return whether a candidate was recorded."""
        return candidate in self._known

    def defaults(self) -> list[Candidate]:
        """Return the first choices that were recorded; all candidates if there are none.

        Records of an earlier generator may have others.
        """
        return list(self._first or self.recorded)

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Return the recorded candidates that differ from `candidate` in one choice."""
        if candidate not in self._near:
            self._near[candidate] = Space.neighbours(self, candidate)
        return self._near[candidate]

    def all(self) -> Iterator[Candidate]:
        """Yield every recorded candidate."""
        return iter(self.recorded)

    def size(self) -> int:
        """Return how many candidates were recorded."""
        return len(self.recorded)

    def draw(self, dice: np.random.Generator) -> Candidate | None:
        """Return a recorded candidate drawn at random."""
        return self.recorded[dice.integers(len(self.recorded))]

    @cached_property
    def _known(self) -> frozenset[Candidate]:
        return frozenset(self.recorded)

    @cached_property
    def _first(self) -> Sequence[Candidate]:
        try:
            return Space.defaults(self)
        except NoKernelFamily:
            return ()
