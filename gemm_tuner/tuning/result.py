"""The result of a sweep in one context."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from gemm_tuner.derive import derive_verdict
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, SweepEnd, Trial
from gemm_tuner.domain.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """When the sweep that answers came to its end, and how: nothing was timed now."""

    on: date
    end: SweepEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The verdict for one context and the trials it rests on; counts are of candidates.

    `together` are the finalists that were timed in the same rounds, those of the last final, or
    else of the last confirmation.
    `note` says in words why the baseline is not the one that was to be expected, and which kernels
    the store had lost; it is empty if all is well. The user stopped one that `is_interrupted`.
    `raced_on` is the text of the smaller problem on which candidates were compared where calls are
    slow; it is empty where that is the problem itself.
    """

    verdict: Verdict
    finalists: tuple[Trial, ...]
    together: tuple[Trial, ...] = ()
    tried: int
    failed: int
    resumed: bool
    note: str = ""
    is_interrupted: bool = False
    recalled: Recalled | None = None
    raced_on: str = ""


def make_result(
    problem: Problem,
    cpu: Cpu,
    context: ExecutionContext,
    trials: Sequence[Trial],
    *,
    complete: bool,
    resumed: bool,
    note: str = "",
    of_slices: Sequence[Trial] = (),
) -> SweepResult:
    """Return the result of `trials`, all that count in a context.

    What was tried only on a slice of the problem is counted, and decides nothing.
    """
    outcomes = {trial.candidate: trial.outcome for trial in trials}
    tried = {trial.candidate: trial.outcome for trial in of_slices} | outcomes
    finals = {
        trial.candidate: trial
        for trial in trials
        if trial.stage in {Stage.FINAL, Stage.CONFIRM}
        and outcomes[trial.candidate] is Outcome.CORRECT
    }
    return SweepResult(
        verdict=derive_verdict(
            trials, problem=problem, cpu_key=cpu.exact_key, context=context, complete=complete
        ),
        finalists=tuple(finals.values()),
        together=last_timed_together(
            [trial for trial in trials if outcomes[trial.candidate] is Outcome.CORRECT]
        ),
        tried=len(tried),
        failed=sum(outcome is not Outcome.CORRECT for outcome in tried.values()),
        resumed=resumed,
        note=note,
    )


def last_timed_together(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the last trials that had the same rounds, or the last confirmation without any.

    They have the same samples of the baseline, as far as they took part.
    """
    careful = [one for one in trials if one.stage in {Stage.FINAL, Stage.CONFIRM}]
    for last in reversed(careful):
        together = tuple(one for one in careful if _shares_rounds(one, last))
        if len(together) > 1:
            return together
    return last_final(trials) or _last_of(Stage.CONFIRM, trials)


def last_final(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the trials of the last final among `trials`, which shared its rounds."""
    return _last_of(Stage.FINAL, trials)


def _last_of(stage: Stage, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    of_stage = [trial for trial in trials if trial.stage is stage and trial.measurement]
    return tuple(trial for trial in of_stage if _shares_rounds(trial, of_stage[-1]))


def _shares_rounds(one: Trial, other: Trial) -> bool:
    if one.measurement is None or other.measurement is None:
        return False
    samples = one.measurement.baseline_timing.samples_ns
    others = other.measurement.baseline_timing.samples_ns
    count = min(len(samples), len(others))
    return one.context == other.context and samples[:count] == others[:count]
