"""A search on a recording: the sweep itself, with recorded trials and a simulated clock."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from zlib import crc32

import numpy as np

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.replay.recorded_space import RecordedSpace
from gemm_tuner.replay.recorded_trials import Clock, RecordedTrials
from gemm_tuner.replay.recording import Recording
from gemm_tuner.replay.samples import Samples
from gemm_tuner.strategies.strategy import ranked
from gemm_tuner.strategies.table import Plan, make_strategy
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.context_sweep import ContextSweep
from gemm_tuner.tuning.patience import Patience

NEAR_BEST = 1.02
_LOOK_S = 0.25  # of a sweep that waits for idle cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One search on a recording.

    `regrets` are the shares of the best speed that were lost by what was the fastest so far, by
    what had been measured, each from a time on, in seconds; before the first, all is lost.
    `winner_regret` is that of the kernel that the sweep ended with. It `tried` so many candidates.
    """

    regrets: tuple[tuple[float, float], ...]
    winner_regret: float
    tried: int

    def regret_at(self, time_s: float) -> float:
        """Return the regret at a time."""
        return ([1.0] + [lost for begin_s, lost in self.regrets if begin_s <= time_s])[-1]

    @property
    def near_best_s(self) -> float:
        """Return when the fastest so far first was within 2 % of the best; inf if it never was."""
        near = (begin_s for begin_s, lost in self.regrets if is_near_best(lost))
        return next(near, inf)


def is_near_best(regret: float) -> bool:
    """Return whether a candidate with this regret is within 2 % of the best."""
    return (1 - regret) * NEAR_BEST >= 1


class Replay:
    """Searches on one recording, each of a budget; the same seed searches the same."""

    def __init__(self, recording: Recording, *, budget_s: float) -> None:
        """Sort the samples."""
        self.recording = recording
        self.space = RecordedSpace.of(recording)
        self.samples = Samples(recording)
        self._speeds = self.samples.speeds()
        self._best = max(self._speeds.values())
        self._budget_s = budget_s

    def run(self, plan: Plan) -> Run:
        """Search by a strategy, confirm the winner, and say how that went."""
        clock, context = Clock(), self.recording.context
        name = f"{self.recording.problem} {context.regime.value} {plan.name}"
        trials = RecordedTrials(
            self.recording,
            self.samples,
            self.space,
            clock=clock,
            dice=np.random.default_rng([plan.seed, crc32(name.encode())]),
        )
        budget = Budget(seconds=self._budget_s, clock=clock)
        budget.started_s = 0.0  # what was prepared counts

        def wait() -> float:
            clock.now_s += _LOOK_S
            return float(context.threads)

        sweep = ContextSweep(
            attempts=trials,
            earlier=(),
            patience=Patience(
                budget_s=self._budget_s, threads=context.threads, idle_cores=wait, clock=clock
            ),
            on_end=lambda _end: None,
            space=self.space,
            context=context,
            whole_budget=budget,
            budget=budget,
            on_progress=lambda _progress: None,
            is_stopped=lambda: False,
        )
        result = sweep.run(make_strategy(self.space, plan), certain=(), is_search=True)
        winner = result.verdict.candidate
        return Run(
            regrets=tuple(self._regrets(trials.timed)),
            winner_regret=1.0 if winner is None else self._regret(winner),
            tried=trials.tried,
        )

    def _regrets(
        self, timed: Sequence[tuple[float, dict[Candidate, float]]]
    ) -> Iterator[tuple[float, float]]:
        """Yield the regret of the fastest so far whenever something was timed."""
        speeds: dict[Candidate, float] = {}
        for end_s, found in timed:
            speeds |= found
            yield end_s, self._regret(ranked(speeds)[0])

    def _regret(self, candidate: Candidate) -> float:
        return 1 - self._speeds[candidate] / self._best
