"""How well the model ranks: its order of the candidates beside what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gemm_tuner.derive import tells_speed
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.domain.verdict import TUNED_ABOVE
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository

TOP = 10
_CARE = (Stage.RACE, Stage.FINAL, Stage.CONFIRM)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedProblem:
    """What the model says of one problem, and what was measured.

    `rank` counts from 1: how many candidates in the model's order are needed to have one that is as
    fast as the best measured, within 2 %; None if none of that order is. `regret` is the share of
    the best speed that is lost by taking the first of that order that was timed.
    """

    problem: Problem
    context: ExecutionContext
    timed: int
    rank: int | None
    regret: float
    first: Candidate
    best: Candidate

    @property
    def is_in_top(self) -> bool:
        """Return whether the best is among the first ten."""
        return self.rank is not None and self.rank <= TOP


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuality:
    """The problems with measurements on a CPU, and what they say of the model."""

    problems: tuple[RankedProblem, ...]

    @property
    def share_in_top(self) -> float:
        """Return for which share of the problems the best is among the first ten."""
        return sum(one.is_in_top for one in self.problems) / len(self.problems)

    @property
    def median_regret(self) -> float:
        """Return the median of the regrets."""
        return median(one.regret for one in self.problems)


def model_quality(repository: Repository, cpu: Cpu) -> ModelQuality:
    """Compare the model's order of candidates with every problem for which a kernel is confirmed.

    The order begins as a sweep does: all register tiles, each with the blocking that is tried
    first; all other candidates come after them. Where several generators measured a problem, the
    last one counts. Records that were imported count as those of the store.
    """
    groups: dict[tuple[Problem, ExecutionContext], list[Trial]] = {}
    for trial in repository.trials(cpu_key=cpu.exact_key, origin=None):
        if tells_speed(trial) and not trial.candidate.below:
            groups.setdefault((trial.problem, trial.context), []).append(trial)
    found = [
        _ranked(problem, context, cpu, trials) for (problem, context), trials in groups.items()
    ]
    return ModelQuality(problems=tuple(one for one in found if one is not None))


def _ranked(
    problem: Problem, context: ExecutionContext, cpu: Cpu, trials: Sequence[Trial]
) -> RankedProblem | None:
    newest = trials[-1].generator
    careful: dict[Candidate, Trial] = {}
    for trial in trials:
        known = careful.get(trial.candidate)
        if trial.generator == newest and (
            known is None or _CARE.index(trial.stage) >= _CARE.index(known.stage)
        ):
            careful[trial.candidate] = trial
    speeds = {
        one: trial.measurement.comparable_speed
        for one, trial in careful.items()
        if trial.measurement
    }
    confirmed = [one for one, trial in careful.items() if trial.stage is not Stage.RACE]
    order = shortlist(
        Space(problem=problem, cpu=cpu, threads=context.threads, regime=context.regime)
    )
    timed = [one for one in order if one in speeds]
    if not confirmed or not timed:
        return None
    best = max(confirmed, key=lambda one: speeds[one])
    as_fast = [
        place
        for place, one in enumerate(order, start=1)
        if speeds.get(one, 0.0) * TUNED_ABOVE >= speeds[best]
    ]
    return RankedProblem(
        problem=problem,
        context=context,
        timed=len(speeds),
        rank=as_fast[0] if as_fast else None,
        regret=max(0.0, 1 - speeds[timed[0]] / speeds[best]),
        first=timed[0],
        best=best,
    )
