"""What a page tells of a database: an answer for each problem, CPU, number of threads and regime.

The answers are derived from trials as those of the store are (`derive.py`). So there are some for
imported records too, which decide nothing: each answer says what it rests on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

from sqlalchemy import Engine

from gemm_tuner.derive import derive_servable, runnable_trials
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Conditions, Outcome, Stage, Trial
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.store.history import History, ProblemHistory, StoredTrial
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.tables import Origin

# A time within this of the best is as good: less is noise.
SETTLED_WITHIN = 1.02
# Between two records of a search; after a longer time, another search began.
BREAK_S = 60.0


class Standing(StrEnum):
    """What an answer rests on."""

    BELIEVED = "measured into this database"
    UNATTESTED = "measured into this database, but attested by no key that is believed here"
    IMPORTED = "imported, measured elsewhere"


class Step(StrEnum):
    """What ended with a record."""

    FAILURE = "a candidate failed"
    PROOF = "a candidate was proved"
    RACE = "a race was timed"
    FINAL = "a final was timed"
    CONFIRM = "a confirmation was timed"


_STEPS = {
    Stage.PREDICTED: Step.PROOF,
    Stage.RACE: Step.RACE,
    Stage.FINAL: Step.FINAL,
    Stage.CONFIRM: Step.CONFIRM,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How the kernel of an answer was found, as its records tell.

    `tried` are different candidates, of which some `failed`. `best_ns` is the least time of a call
    so far, after each timing.
    """

    tried: int
    failed: int
    best_ns: tuple[float, ...]

    def over_last(self, number: int) -> float:
        """Return the least time after so many timings, or after all, over that after the last."""
        return self.best_ns[min(number, len(self.best_ns)) - 1] / self.best_ns[-1]

    @property
    def settled_at(self) -> int:
        """Return after how many timings the least time was within 2 % of the last."""
        enough_ns = SETTLED_WITHIN * self.best_ns[-1]
        return next(
            number for number, best in enumerate(self.best_ns, start=1) if best <= enough_ns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A verdict with its measurement, the conditions of that, and how many `hosts` confirmed it.

    A host is a measuring key that is believed. `in_range_ns` is the time of a call of the newest
    library for a range of m that was timed at this m.
    """

    cpu: Cpu
    verdict: Verdict
    measured: Evidence
    toolchain: str
    standing: Standing
    conditions: Conditions | None
    search: Search
    hosts: int
    in_range_ns: float | None = None

    @property
    def problem(self) -> Problem:
        """Return the problem."""
        return self.verdict.problem

    @property
    def context(self) -> ExecutionContext:
        """Return how many threads, and in which regime."""
        return self.verdict.context

    @property
    def gflop_per_s(self) -> float:
        """Return the speed of the kernel, with the largest m of a range."""
        return self.problem.flop(self.problem.m.high) / self.measured.candidate_median_ns

    @property
    def baseline_gflop_per_s(self) -> float:
        """Return the speed of the baseline in the same rounds."""
        return self.problem.flop(self.problem.m.high) / self.measured.baseline_median_ns

    @property
    def share_of_peak(self) -> float | None:
        """Return the speed over that of multiply-adds measured beside it, None if not known.

        So it is where nothing is multiplied, or what was recorded is not a peak.
        """
        if self.conditions is None:
            return None
        flop = self.problem.flop(self.problem.m.high)
        call_ns = self.measured.candidate_median_ns
        return self.conditions.share_of_peak(flop, call_ns, self.context.threads)


@dataclass(slots=True, kw_only=True)
class Spent:
    """How many records ended with a step, and the time before them that was no break."""

    records: int = 0
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Contents:
    """All that a page tells of one database.

    `unanswered` were tried, but no kernel was confirmed. `spent` is told of what was run here. So
    many hosts as the `quorum` says must find the same before a kernel is served.
    """

    name: str
    quorum: int = 1
    answers: list[Answer] = field(default_factory=list)
    unanswered: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    spent: dict[Step, Spent] = field(default_factory=dict)
    breaks: int = 0

    def count_time(self, trials: Iterable[Trial]) -> None:
        """Add the time between the records of sweeps of one problem, given in their order."""
        before: Trial | None = None
        for trial in trials:
            spent = self.spent.setdefault(_step_of(trial), Spent())
            spent.records += 1
            seconds = (trial.created_at - before.created_at).total_seconds() if before else 0.0
            if seconds > BREAK_S:
                self.breaks += 1
            else:
                spent.seconds += seconds
            before = trial


def read_contents(
    engine: Engine, name: str, tell: Callable[[int, int], None] = lambda _done, _total: None
) -> Contents:
    """Return what a database holds; `tell` hears how many problems are read, of how many.

    Raises:
        StoreFailed: the database does not answer, or is damaged.
    """
    contents = Contents(name=name, quorum=Repository(engine).quorum())
    for history in History(engine).problems(tell):
        by_cpu: dict[str, list[StoredTrial]] = {}
        for one in history.trials:
            by_cpu.setdefault(one.trial.cpu.exact_key, []).append(one)
        for tried in by_cpu.values():
            here = [one.trial for one in tried if one.origin is Origin.MEASURED]
            # One sweep searches both regimes, another one other numbers of threads.
            for threads in {trial.context.threads for trial in here}:
                contents.count_time(
                    _by_date(trial for trial in here if trial.context.threads == threads)
                )
            contents.outcomes.update(one.trial.outcome for one in tried)
            for context in dict.fromkeys(one.trial.context for one in tried):
                answer = _answer_of(history, tried, context)
                if answer is None:
                    contents.unanswered += 1
                else:
                    contents.answers.append(answer)
    return contents


def _answer_of(
    history: ProblemHistory, tried: Sequence[StoredTrial], context: ExecutionContext
) -> Answer | None:
    """Return the answer for the CPU of `tried`, from the best that there is to rest on."""
    here = [one for one in tried if one.origin is Origin.MEASURED]
    candidates = {
        Standing.BELIEVED: [one for one in here if one.is_believed],
        Standing.UNATTESTED: here,
        Standing.IMPORTED: [one for one in tried if one.origin is Origin.IMPORTED],
    }
    for standing, stored in candidates.items():
        answer = _derive(history, stored, context, standing)
        if answer is not None:
            return answer
    return None


def _derive(
    history: ProblemHistory,
    stored: Sequence[StoredTrial],
    context: ExecutionContext,
    standing: Standing,
) -> Answer | None:
    if not stored:
        return None
    trials = [one.trial for one in stored]
    cpu = trials[-1].cpu
    runnable = runnable_trials(trials, context, cpu.isa)
    verdict, _confirmed = derive_servable(
        runnable,
        problem=history.problem,
        cpu_key=cpu.exact_key,
        basis=Basis.MEASURED,
        # A page tells what was measured, also of kernels that are not in the store any more.
        held={trial.artifact.sha256 for trial in runnable if trial.artifact},
        exhausted=history.exhausted,
    )
    if verdict is None or verdict.measurement is None:
        return None
    decisive = next(
        trial
        for trial in runnable
        if trial.candidate == verdict.candidate and trial.created_at == verdict.tried_at
    )
    return Answer(
        cpu=decisive.cpu,
        verdict=verdict,
        measured=verdict.measurement,
        toolchain=decisive.toolchain,
        standing=standing,
        conditions=decisive.conditions,
        search=_search_of(
            [
                trial
                for trial in trials
                if trial.context == context
                and (trial.generator, trial.toolchain) == (decisive.generator, decisive.toolchain)
            ]
        ),
        hosts=len(
            {
                one.key
                for one in stored
                if one.is_believed
                and (one.trial.stage, one.trial.context) == (Stage.CONFIRM, context)
                and one.trial.artifact == decisive.artifact
            }
        ),
        in_range_ns=_in_range_ns(trials, context) if history.problem.m.exact else None,
    )


def _in_range_ns(trials: Iterable[Trial], context: ExecutionContext) -> float | None:
    """Return the time of the last of several kernels for a range that was timed at an m."""
    times_ns = [
        trial.measurement.candidate.median_ns
        for trial in _by_date(trials)
        if trial.candidate.below and trial.measurement and trial.context == context
    ]
    return times_ns[-1] if times_ns else None


def _search_of(trials: Sequence[Trial]) -> Search:
    medians_ns = [
        trial.measurement.candidate.median_ns for trial in _by_date(trials) if trial.measurement
    ]
    return Search(
        tried=len({trial.candidate for trial in trials}),
        failed=len({one.candidate for one in trials if one.outcome is not Outcome.CORRECT}),
        best_ns=tuple(accumulate(medians_ns, min)),
    )


def _by_date(trials: Iterable[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: trial.created_at)


def _step_of(trial: Trial) -> Step:
    if trial.outcome is not Outcome.CORRECT:
        return Step.FAILURE
    return Step.PROOF if trial.measurement is None else _STEPS[trial.stage]
