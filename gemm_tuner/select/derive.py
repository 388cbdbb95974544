"""Derive a verdict from trials."""

from collections.abc import Iterable, Mapping, Sequence

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.doubt import why_doubted
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.verdict import Basis, Decision, Verdict, decide, is_as_fast
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import loads_per_multiplication

EQUALLY_FAST = 1.01
SCALAR = "scalar"  # how the name begins of the baseline for want of a library


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
    that it rests on, but names no artifact unless that shows it to be as fast as the baseline. What
    gives reason to doubt is no evidence: alone, it gives a tie that is not complete.
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
        decision=decide_beside(measurement),
        basis=basis,
        complete=complete and bool(believed),
        candidate=best.candidate,
        artifact=best.artifact if believed and is_as_fast(measurement.ratio) else None,
        measurement=measurement,
        generator=best.generator,
        tried_at=best.created_at,
    )


def decide_beside(measurement: Measurement) -> Decision:
    """Return the decision; to be faster than our own scalar loop is no claim.

    Nothing is decided by what gives reason to doubt.
    """
    if why_doubted(measurement) is not None:
        return Decision.TIE
    decision = decide(measurement.ratio)
    is_library = not measurement.baseline.startswith(SCALAR)
    return decision if is_library or decision is not Decision.TUNED else Decision.TIE


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


def sturdiest_of_fastest(speeds: Mapping[Candidate, float], problem: Problem) -> Candidate:
    """Return the sturdiest candidate of those within 1 % of the greatest speed.

    That is one of one part, then the one with the fewest loads for each multiplication: what comes
    from a cache may take longer beside other work. Of equal ones it is the simplest. So the same
    sweep gives the same answer twice.
    """
    greatest = max(speeds.values())
    equal = [one for one, speed in speeds.items() if speed * EQUALLY_FAST >= greatest]

    def sturdiness(candidate: Candidate) -> tuple[bool, float, int, str]:
        family = family_named(candidate.micro_kernel.family)
        loads = loads_per_multiplication(problem, candidate, family)
        return (candidate.parts > 1, loads, *_simplicity(candidate))

    return min(equal, key=sturdiness)


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
