"""Adoption: what is recorded to have won on this CPU model is rebuilt, proved and timed here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from gemm_tuner.derive import is_believed, standing_trials
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Trial
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.select.choose import choose
from gemm_tuner.select.recorded import Recorded, RecordedWinners, Records, recorded_winners
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import NOMINAL_CLOCK_HZ, predict_cycles
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.race import find_race
from gemm_tuner.tuning.result import SweepResult
from gemm_tuner.tuning.sampling import are_confirmed_at_once, confirming_s, how_to_confirm
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.standing import stands
from gemm_tuner.tuning.sweep import sweep

# As in a sweep of 30 s: with less, claims would be beside fewer libraries.
_RACE_S = 3.0

# A third would take a fifth of the time, and win 0.2 % in the mean (docs/decisions/0046).
_MOST_WINNERS = 2

NOT_TIMED = "not timed here"
NOT_BELIEVED = "its timing is not believed"

# Inputs, exact results, libraries and proofs, and what is prepared for each context. The 42 public
# layers in f32 on Zen 4, two cores that other work shared, 2026-11-23: 1 to 17 s.
_START_S = 1.0
_PREPARING_S = 0.3
_S_PER_ELEMENT = 2e-7
_S_PER_FLOP = 5e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What an adoption would do for a problem in one context.

    `before` is the answer that a user gets now, and `why` says why it is to be measured; empty if
    it is up to date. The `winners` are what would be timed.
    """

    context: ExecutionContext
    before: Verdict
    why: str
    winners: RecordedWinners

    @property
    def is_current(self) -> bool:
        """Return whether there is nothing to do."""
        return not self.why

    @property
    def is_known(self) -> bool:
        """Return whether there is a verdict that was measured here, and is believed."""
        return self.before.basis is Basis.MEASURED and self.before.doubt is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What an adoption found in one context; `now` is the answer that a user gets from now on.

    `took_s` is the time of all contexts of the problem. The kernel that was measured is that of a
    `record`, unless it was known here only. Of the recorded kernels, some `failed` here.
    """

    planned: Planned
    result: SweepResult
    now: Verdict
    took_s: float
    record: Recorded | None
    failed: tuple[Trial, ...]

    @property
    def is_measured(self) -> bool:
        """Return whether a kernel was confirmed, whatever came of it."""
        return self.result.verdict.measurement is not None

    @property
    def is_changed(self) -> bool:
        """Return whether a verdict that was measured here before is another one now."""
        return self.planned.is_known and _said(self.planned.before) != _said(self.now)


def plan(
    problem: Problem,
    contexts: Sequence[ExecutionContext],
    *,
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    records: Records,
) -> tuple[Planned, ...]:
    """Return what is to be done for a problem in each context, all of as many threads.

    Raises:
        InvalidProblem: the problem multiplies nothing.
        StoreFailed: the database does not answer, or a row of it is damaged.
    """
    space = Space(problem=problem, cpu=cpu, threads=contexts[0].threads)
    return tuple(
        Planned(
            context=context,
            before=choose(repository, problem, cpu=cpu, context=context).verdict,
            why=why_measured(problem, context, cpu=cpu, repository=repository, settings=settings),
            winners=recorded_winners(
                records, replace(space, regime=context.regime), context, most=_MOST_WINNERS
            ),
        )
        for context in contexts
    )


def why_measured(
    problem: Problem,
    context: ExecutionContext,
    *,
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
) -> str:
    """Return why a verdict is to be measured here; empty if it is up to date.

    It is up to date if this generator, this compiler and, as far as libraries were raced for the
    baseline, those that are installed now are behind the last confirmation.
    """
    trials = repository.trials(problem=problem, cpu_key=cpu.exact_key, only_decisive=True)
    confirmed = [trial for trial in standing_trials(trials) if trial.context == context]
    believed = [trial for trial in confirmed if is_believed(trial)]
    if not believed:
        return NOT_BELIEVED if confirmed else NOT_TIMED
    last = believed[-1]
    if last.generator != generator_version():
        return f"timed with another generator, {last.generator}"
    if not stands(last, settings.toolchain):
        return f"built by another compiler or with other flags, {last.toolchain}"
    raced = last.measurement.raced if last.measurement else ()
    to_race = replace(settings, race_s=_RACE_S)
    if raced and not find_race([last], to_race, context=context).earlier:
        return f"timed beside {raced[0].baseline}, and other libraries would be raced now"
    return "measured anew, as was asked for" if settings.again else ""


def expected_s(
    problem: Problem, planned: Sequence[Planned], cpu: Cpu, settings: SweepSettings
) -> float:
    """Return about how long an adoption takes, in seconds, by the time that the model predicts."""
    candidates = {one for each in planned for one in each.winners.candidates}
    if not candidates:
        return 0.0
    fastest = min(
        predict_cycles(problem, one, family_named(one.micro_kernel.family), cpu)
        for one in candidates
    )
    call_s, count = fastest / NOMINAL_CLOCK_HZ, len(candidates)
    threads, budget_s = planned[0].context.threads, settings.budget_s
    if are_confirmed_at_once(count, call_s=call_s, threads=threads):
        how = how_to_confirm(call_s, threads)
        confirming = how.duration_s(count, call_s=call_s, budget_s=budget_s)
    else:
        confirming = confirming_s(call_s, budget_s, threads=threads, finalists=count)
    rows = problem.m.high
    elements = rows * problem.k + problem.n * problem.k + rows * problem.n
    proving = _S_PER_ELEMENT * elements + _S_PER_FLOP * problem.flop(rows)
    return _START_S + proving + len(planned) * (_PREPARING_S + confirming)


def adopt(
    problem: Problem,
    planned: Sequence[Planned],
    *,
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    on_progress: Callable[[Progress], None],
    is_stopped: Callable[[], bool],
) -> tuple[Adopted, ...]:
    """Rebuild the recorded winners of a problem, prove and time them here, and keep what was found.

    All contexts time the winners of each: one that wins in another regime may win here too. What
    was `planned` in a context without winners is left out. No search follows.

    Raises:
        GemmTunerError: as `sweep`.
    """
    to_do = [one for one in planned if one.winners.winners and not one.is_current]
    if not to_do:
        return ()
    started_s = monotonic()
    records: dict[Candidate, Recorded] = {}
    for each in to_do:
        for one in each.winners.winners:
            records.setdefault(one.trial.candidate, one)
    is_known = any(one.is_known for one in to_do)
    results = sweep(
        problem,
        contexts=[one.context for one in to_do],
        cpu=cpu,
        repository=repository,
        # What does not stand any more is measured anew, or its times would be taken over.
        settings=replace(
            settings, again=settings.again or is_known, race_s=_RACE_S, tries_all_chosen=True
        ),
        on_progress=on_progress,
        is_stopped=is_stopped,
        chosen=tuple(records),
    )
    took_s = monotonic() - started_s
    failed = {
        trial.candidate: trial
        for trial in repository.trials(problem=problem, cpu_key=cpu.exact_key)
        if trial.candidate in records
        and trial.outcome is not Outcome.CORRECT
        and trial.generator == generator_version()
    }
    return tuple(
        Adopted(
            planned=one,
            result=result,
            now=choose(repository, problem, cpu=cpu, context=one.context).verdict,
            took_s=took_s,
            record=records.get(result.verdict.candidate) if result.verdict.candidate else None,
            failed=tuple(failed.values()),
        )
        for one, result in zip(to_do, results, strict=True)
    )


def _said(verdict: Verdict) -> tuple[object, ...]:
    """Return what a user notices of a verdict: a kernel that is not served is nobody's."""
    is_served = verdict.artifact is not None
    return verdict.decision, is_served, verdict.candidate if is_served else None
