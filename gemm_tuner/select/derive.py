"""From trials to a verdict."""

from collections.abc import Sequence

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.verdict import Basis, Decision, Verdict, decide

EQUALLY_FAST = 1.01


def derive_verdict(
    trials: Sequence[Trial],
    *,
    problem: Problem,
    cpu_key: str,
    context: ExecutionContext,
    complete: bool,
    basis: Basis = Basis.MEASURED,
) -> Verdict:
    """Return the verdict that the final trials among `trials`, all of one generator, allow.

    The candidate with the smallest median time stands against the baseline, or the simplest of
    those that are within 1 % of it, so that the same sweep gives the same answer twice. Of several
    trials of one candidate the latest counts. A verdict for the baseline keeps the measurement that
    it rests on, but names no artifact.
    """
    latest: dict[str, tuple[Trial, Measurement]] = {}
    for trial in trials:
        if (
            trial.stage is Stage.FINAL
            and trial.outcome is Outcome.CORRECT
            and trial.measurement is not None
        ):
            latest[trial.candidate.text] = (trial, trial.measurement)
    if not latest:
        return no_verdict(problem, cpu_key=cpu_key, context=context)

    fastest_ns = min(measurement.candidate.median_ns for _trial, measurement in latest.values())
    best, measurement = min(
        (
            (trial, measurement)
            for trial, measurement in latest.values()
            if measurement.candidate.median_ns <= EQUALLY_FAST * fastest_ns
        ),
        key=lambda item: (item[0].candidate.complexity, item[0].candidate.text),
    )
    decision = decide(measurement.ratio)
    return Verdict(
        problem=problem,
        cpu_key=cpu_key,
        context=context,
        decision=decision,
        basis=basis,
        complete=complete,
        candidate=best.candidate,
        artifact=None if decision is Decision.BASELINE else best.artifact,
        measurement=measurement,
    )


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
