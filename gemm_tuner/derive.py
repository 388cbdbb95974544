"""Derive a verdict from trials.

This is the only place where it is done: when trials are added, when the store is asked, and at the
end of a sweep.
"""

from collections.abc import Collection, Iterable, Sequence

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.comparison import Comparison
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.doubt import why_doubted
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.verdict import (
    Basis,
    Decision,
    Verdict,
    decide,
    is_faster_whatever_threads_wait,
)
from gemm_tuner.errors import InvalidRecord

# To be raised when other verdicts follow from the same trials, or they are stored in another form:
# then all are derived again.
RULES = 4
SCALAR = "scalar"  # how the name begins of the baseline for want of a library

# A sweep that came to the end of its search: CPU, context, toolchain, generator and baseline.
SweepKey = tuple[str, ExecutionContext, str, str, str]


def runnable_trials(
    trials: Iterable[Trial], context: ExecutionContext, isa: frozenset[IsaFeature]
) -> tuple[Trial, ...]:
    """Return the standing trials in `context` of kernels that need no more features than `isa`.

    `trials` are of one problem, in every stage and context: a failure in any of them speaks
    against a kernel.
    """
    return tuple(
        trial
        for trial in standing_trials(trials)
        if trial.context == context and trial.artifact and trial.artifact.required_isa <= isa
    )


def derive_servable(
    runnable: Sequence[Trial],
    *,
    problem: Problem,
    cpu_key: str,
    basis: Basis,
    held: Collection[str],
    exhausted: Collection[SweepKey],
) -> tuple[Verdict | None, tuple[Trial, ...]]:
    """Return the verdict from the newest generator that gives one, of `runnable` trials.

    With it come the confirmed trials, of this generator, of kernels that could be served. A verdict
    whose measurement gives reason to doubt is returned where there is no other.

    Trials beside different baselines are not compared: the newest count. Only kernels are named
    whose binaries are in the store, as `held` says. `exhausted` are the sweeps of the problem that
    came to the end of their search.
    """
    doubted: Verdict | None = None
    for group in dict.fromkeys(_group(trial) for trial in reversed(runnable)):
        of_group = [trial for trial in runnable if _group(trial) == group]
        in_store = [t for t in of_group if t.artifact and t.artifact.sha256 in held]
        counting = in_store or of_group
        verdict = derive_verdict(
            counting,
            problem=problem,
            cpu_key=cpu_key,
            context=counting[-1].context,
            complete=_sweep_key(counting[-1]) in exhausted,
            basis=basis,
        )
        if verdict.doubt is not None:
            doubted = doubted or verdict
        elif verdict.artifact is None or verdict.artifact.sha256 in held:
            return verdict, tuple(trial for trial in in_store if is_believed(trial))
    return doubted, ()


def _group(trial: Trial) -> tuple[str, str]:
    """Return the key that comparable trials share: the generator and the baseline."""
    return trial.generator, trial.measurement.baseline if trial.measurement else ""


def _sweep_key(trial: Trial) -> SweepKey:
    generator, baseline = _group(trial)
    return trial.cpu.exact_key, trial.context, trial.toolchain, generator, baseline


def derive_verdict(
    trials: Sequence[Trial],
    *,
    problem: Problem,
    cpu_key: str,
    context: ExecutionContext,
    complete: bool,
    basis: Basis = Basis.MEASURED,
) -> Verdict:
    """Return the verdict that `trials`, all of one generator and beside one baseline, allow.

    Beside the scalar baseline there is nothing faster to claim: at best a tie.

    Of the candidates confirmed in `context`, each in rounds of its own, the fastest by what can be
    compared between them stands against its own paired baseline. A verdict keeps the measurement
    that it rests on, but names no artifact unless that shows it to be as fast as what would run
    instead. What gives reason to doubt is no evidence: alone, it gives a tie that is not complete.
    """
    confirmed = [
        (trial, trial.measurement)
        for trial in standing_trials(trials)
        if trial.context == context and trial.measurement is not None
    ]
    if not confirmed:
        return no_verdict(problem, cpu_key=cpu_key, context=context)

    believed = [one for one in confirmed if why_doubted(one[1]) is None]
    best, measurement = min(
        believed or confirmed,
        key=lambda one: (-one[1].comparable_speed, _simplicity(one[0].candidate)),
    )
    return Verdict(
        problem=problem,
        cpu_key=cpu_key,
        context=context,
        decision=decide_by(best),
        basis=basis,
        complete=complete and bool(believed),
        candidate=best.candidate,
        artifact=best.artifact if believed and is_servable(measurement) else None,
        measurement=Evidence.of(measurement),
        generator=best.generator,
        tried_at=best.created_at,
    )


def is_servable(measurement: Measurement) -> bool:
    """Return whether a kernel is as fast as the library that would run in its place."""
    return Comparison.of(measurement.ratio, measurement.baseline, measurement.raced).is_servable


def decide_by(trial: Trial) -> Decision:
    """Return what a measured trial decides; to be faster than our own scalar loop is no claim.

    Nothing is decided by what gives reason to doubt, or by less than the threads of a call may wait
    for each other another time. Raises `InvalidRecord` if nothing was measured.
    """
    measurement = trial.measurement
    if measurement is None:
        raise InvalidRecord("a trial without a measurement decides nothing.")
    if why_doubted(measurement) is not None:
        return Decision.TIE
    decision = decide(measurement.ratio)
    is_claim = not measurement.baseline.startswith(SCALAR) and is_faster_whatever_threads_wait(
        trial.candidate.threads_used(trial.context.threads),
        kernel_ns=measurement.candidate.median_ns,
        baseline_ns=measurement.baseline_timing.median_ns,
    )
    return decision if is_claim or decision is not Decision.TUNED else Decision.TIE


def standing_trials(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Return the latest confirming trial of each build and context, in the order of `trials`.

    A build that failed after it was confirmed, in whatever stage or context, has none. What gives
    reason to doubt stands only where there is nothing else; what was timed with more threads than
    there were CPUs does not stand.
    """
    standing: dict[tuple[Candidate, str, ExecutionContext], Trial] = {}
    for trial in trials:
        if trial.artifact is None:
            continue
        build = (trial.candidate, trial.artifact.sha256)
        if trial.outcome is not Outcome.CORRECT:
            standing = {key: kept for key, kept in standing.items() if key[:2] != build}
        elif (
            trial.stage is Stage.CONFIRM and trial.measurement is not None and trial.had_its_threads
        ):
            key = (*build, trial.context)
            if is_believed(trial) or not (key in standing and is_believed(standing[key])):
                standing.pop(key, None)
                standing[key] = trial
    return tuple(standing.values())


def is_believed(trial: Trial) -> bool:
    """Return whether a trial has a measurement that gives no reason to doubt."""
    return trial.measurement is not None and why_doubted(trial.measurement) is None


def no_verdict(problem: Problem, *, cpu_key: str, context: ExecutionContext) -> Verdict:
    """Return the verdict when nothing is known: the baseline."""
    return Verdict(
        problem=problem,
        cpu_key=cpu_key,
        context=context,
        decision=Decision.BASELINE,
        basis=Basis.NONE,
        complete=False,
    )


def _simplicity(candidate: Candidate) -> tuple[int, str]:
    return (candidate.complexity, candidate.text)
