"""Running a job: a sweep within its budget, and what its end means for it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.job import JobProgress, JobState
from gemm_tuner.domain.reason import LEAD_OF_WAITING
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import PreparationStopped, TrialFailed
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.verdicts.withheld import Withheld
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.earlier import earlier_trials
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.ranges.holding import HeldJob
from gemm_tuner.tuning.ranges.range_budget import budget_of_each
from gemm_tuner.tuning.ranges.range_search import Stopped
from gemm_tuner.tuning.ranges.split_range import split_range
from gemm_tuner.tuning.result import SweepResult
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep

logger = logging.getLogger(__name__)

_CONFIRMING_S = 10.0  # of a job that is cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a job ends: its state, and what came out; WAITING where another try is worth it.

    A try that the store cut off `counts` for nothing.
    """

    state: JobState
    detail: str
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """A job on this machine: its sweep goes on with the trials that are stored.

    A worker that `is_stopped` lets go of its job after the trial in flight.
    """

    held: HeldJob
    cpu: Cpu
    repository: Repository
    toolchain: Toolchain
    is_stopped: Callable[[], bool]

    def run(self) -> Ending | None:
        """Tune the problem, and return how the job ends; None if it was stopped or lost before.

        A range of m becomes one library of several kernels where the budget suffices for that. A
        job that is cancelled ends with the best so far, which is confirmed within some seconds. One
        whose deciding measurement other work disturbed is to be tried again.

        Raises:
            GemmTunerError: as `sweep` does.
        """
        others = self._withheld()
        is_second = bool(others.hosts) and not self.repository.has_measured(others)
        job = self.held.job
        each_s = None if is_second else budget_of_each(job.problem, job.budget_s)
        # A range of m is swept more than once in a job: what is there may be of another sweep.
        since = job.created_at if each_s is None else None
        if each_s is not None:
            result = self._split_range(each_s)
        else:
            result = self._sweep(
                job.budget_s,
                lambda: self._is_ended,
                chosen=self._to_confirm(others) if is_second else (),
                again=is_second,
                since=since,
            )
        if result is not None and not result.is_interrupted:
            return self._ending(result, is_second=is_second)
        if self._is_given_up:
            return None
        best = self._best_so_far()
        if best is None:
            kept = "" if each_s is None else " for the range; what was tried for single m is kept"
            detail = f"cancelled before a kernel was timed{kept}"
            return Ending(state=JobState.CANCELLED, detail=detail)
        budget_s = min(_CONFIRMING_S, self.held.job.budget_s)
        result = self._sweep(budget_s, lambda: self._is_given_up, chosen=(best,), since=since)
        if result is None or result.is_interrupted:
            return None
        found = _text_of(result.verdict) or "the best could not be confirmed"
        return Ending(state=JobState.CANCELLED, detail=f"cancelled; {found}")

    @property
    def _is_given_up(self) -> bool:
        return self.is_stopped() or self.held.is_lost

    @property
    def _is_cancelled(self) -> bool:
        return self.held.is_cancelled

    @property
    def _is_ended(self) -> bool:
        return self._is_given_up or self._is_cancelled

    def _split_range(self, each_s: float) -> SweepResult | None:
        """Return what came of a range of m as one library, with some seconds for each m.

        Where that fails, the range is tuned at its greatest m in what time is left. None if it was
        stopped before.
        """
        job = self.held.job
        left = Budget(seconds=job.budget_s)
        try:
            split_range(
                job.problem,
                context=job.context,
                cpu=self.cpu,
                repository=self.repository,
                settings=SweepSettings(
                    budget_s=each_s, toolchain=self.toolchain, stops_preparing=True
                ),
                on_progress=self._note,
                is_stopped=lambda: self._is_ended,
            )
        except (Stopped, PreparationStopped):
            return None
        except TrialFailed as error:
            logger.info("%s: not split: %s", job.problem.text, error)
            each_s = max(each_s, left.remaining_s)
        return self._sweep(each_s, lambda: self._is_ended)

    def _sweep(
        self,
        budget_s: float,
        is_stopped: Callable[[], bool],
        *,
        chosen: tuple[Candidate, ...] = (),
        again: bool = False,
        since: datetime | None = None,
    ) -> SweepResult | None:
        """Return what a sweep found, None if it was stopped before it could try anything."""
        job = self.held.job
        settings = SweepSettings(
            budget_s=budget_s,
            toolchain=self.toolchain,
            again=again,
            stops_preparing=True,
            since=since,
        )
        try:
            (result,) = sweep(
                job.problem,
                contexts=[job.context],
                cpu=self.cpu,
                repository=self.repository,
                settings=settings,
                on_progress=self._note,
                is_stopped=is_stopped,
                chosen=chosen,
            )
        except PreparationStopped:
            return None
        measured = result.verdict.measurement
        self.held.note(
            JobProgress(
                tried=result.tried,
                failed=result.failed,
                best_ns=measured.candidate_median_ns if measured else None,
                over_baseline=measured.ratio.median if measured else None,
                seconds_left=0.0,
            )
        )
        return result

    def _note(self, step: Progress) -> None:
        self.held.note(
            JobProgress(
                tried=step.done,
                failed=step.failed,
                best_ns=step.best_ns,
                over_baseline=step.best_ratio,
                seconds_left=step.remaining_s,
            )
        )

    def _withheld(self) -> Withheld:
        job = self.held.job
        return self.repository.withheld(job.problem, class_key=job.class_key, context=job.context)

    def _to_confirm(self, others: Withheld) -> tuple[Candidate, ...]:
        """Return what others found, and this version can make: another may know other families."""
        found = self.repository.found_by_others(others)
        return tuple(one for one in found if one.micro_kernel.family in CATALOG)

    def _best_so_far(self) -> Candidate | None:
        """Return the fastest that was timed in this context, None if nothing was."""
        job = self.held.job
        trials = earlier_trials(self.repository, job.problem, self.cpu, self.toolchain)
        speeds = {
            trial.candidate: trial.measurement.comparable_speed
            for trial in trials
            if trial.context == job.context
            and trial.outcome is Outcome.CORRECT
            and trial.measurement is not None
        }
        return max(speeds, key=lambda one: (speeds[one], one.text), default=None)

    def _ending(self, result: SweepResult, *, is_second: bool) -> Ending:
        """Return how a job ends whose sweep came to its end.

        That of a host which is to measure what others did is in vain if it confirmed nothing.
        """
        now = self._withheld()
        if is_second and now.hosts and not self.repository.has_measured(now):
            why = "this host confirmed nothing of what others found"
            return Ending(state=JobState.WAITING, detail=why)
        verdict = result.verdict
        found = _text_of(verdict)
        if found is None:
            return Ending(
                state=JobState.FAILED,
                detail=f"nothing was confirmed in {self.held.job.budget_s:g} s: {result.tried} "
                f"candidates were tried, and {result.failed} failed; give it a larger budget",
            )
        if verdict.doubt is not None:
            return Ending(state=JobState.WAITING, detail=f"nothing is decided: {verdict.doubt}")
        return Ending(
            state=JobState.DONE, detail=". ".join(filter(None, (found, now.text, result.note)))
        )


def _text_of(verdict: Verdict) -> str | None:
    """Return what was measured, None if nothing: `tuned: 1.31 times onednn 3 (1.29 to 1.33)`."""
    measured = verdict.measurement
    if measured is None:
        return None
    ratio = measured.ratio
    waiting = f"; {LEAD_OF_WAITING}" if verdict.is_lead_of_waiting else ""
    return (
        f"{verdict.decision.value}: {ratio.median:.2f} times {measured.baseline} "
        f"({ratio.low:.2f} to {ratio.high:.2f}){waiting}"
    )
