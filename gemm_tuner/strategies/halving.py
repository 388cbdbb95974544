"""Many candidates with few samples, then the best of them with more, and again.

Source: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter
Optimization, AISTATS 2016.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.space.candidates import Space
from gemm_tuner.strategies.random_search import draw
from gemm_tuner.strategies.strategy import BATCH, NOTABLE_GAIN, Batch, Line, Speeds, ranked

_DRAWN = 27
_KEPT = 3  # one of so many; the others have so many times as many samples
_MOST_SAMPLES = 9


class SuccessiveHalving:
    """Draw 27 candidates at random; time the best 9 again with more samples, then the best 3.

    The `seeds` are among the first 27. It starts again with others until that brings less than
    half a percent.
    """

    def __init__(self, space: Space, *, seed: int, seeds: Sequence[Candidate] = ()) -> None:
        self._space = space
        self._dice = np.random.default_rng(seed)
        self._line = Line(seeds)
        self._group: list[Candidate] = []
        self._waiting: list[Batch] = []
        self._sample_factor = 0
        self._best_before = 0.0

    def propose(self, speeds: Speeds) -> Batch:
        """Return the next of a group, or the first of the best of it with more samples."""
        if not self._waiting:
            self._go_on(speeds)
            self._waiting = [
                Batch(
                    candidates=tuple(self._group[start : start + BATCH]),
                    sample_factor=self._sample_factor,
                )
                for start in range(0, len(self._group), BATCH)
            ]
        return self._waiting.pop(0) if self._waiting else Batch(candidates=())

    @property
    def pending(self) -> int:
        """Return how many candidates are already in line."""
        return sum(len(batch.candidates) for batch in self._waiting)

    def _go_on(self, speeds: Speeds) -> None:
        """Keep the best of a group, or begin another one."""
        if 0 < self._sample_factor < _MOST_SAMPLES:
            best = [one for one in ranked(speeds) if one in self._group]
            self._group = best[: ceil(len(self._group) / _KEPT)]
            self._sample_factor *= _KEPT
            if self._group:
                return
        self._draw_group(speeds)

    def _draw_group(self, speeds: Speeds) -> None:
        best = max(speeds.values(), default=0.0)
        self._group = []
        if best < self._best_before * NOTABLE_GAIN:
            return
        self._best_before = best
        draw(self._space, self._dice, self._line, _DRAWN)
        while len(self._group) < _DRAWN and self._line:
            self._group += self._line.next_batch().candidates
        self._sample_factor = 1
