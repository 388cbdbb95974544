"""Candidates drawn at random: what any other strategy has to beat."""

from collections.abc import Sequence

import numpy as np

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.space.candidates import Space
from gemm_tuner.strategies.strategy import BATCH, Batch, Line, Speeds

_MOST_DRAWN_IN_VAIN = 1000


class RandomSearch:
    """Propose candidates drawn at random, the `seeds` first; the same `seed` draws the same.

    It is over when a thousand draws in a row bring nothing new.
    """

    def __init__(self, space: Space, *, seed: int, seeds: Sequence[Candidate] = ()) -> None:
        self._space = space
        self._dice = np.random.default_rng(seed)
        self._line = Line(seeds)

    def propose(self, _speeds: Speeds) -> Batch:
        """Return the next ones."""
        draw(self._space, self._dice, self._line, BATCH)
        return self._line.next_batch()

    @property
    def pending(self) -> int:
        """Return how many candidates are already in line."""
        return len(self._line)


def draw(space: Space, dice: np.random.Generator, line: Line, count: int) -> None:
    """Put candidates in line until so many wait there, or a thousand draws bring nothing new."""
    in_vain = 0
    while len(line) < count and in_vain < _MOST_DRAWN_IN_VAIN:
        candidate = space.draw(dice)
        in_vain = in_vain + 1 if candidate is None or candidate in line else 0
        line.add([candidate] if candidate else [])
