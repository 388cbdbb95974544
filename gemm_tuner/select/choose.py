"""Look up the verdict for a question, step by step, with its reasons."""

from dataclasses import dataclass

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.reason import speed_text, why_not_served
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.select.bucket import bucket
from gemm_tuner.select.derive import no_verdict
from gemm_tuner.select.measured import exact, sibling
from gemm_tuner.select.predicted import predicted
from gemm_tuner.select.same_model import same_model
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.tables import Origin

_LADDER = (exact, sibling, bucket, same_model, predicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A verdict, and one sentence for each step of the lookup that was tried.

    `confirmed` are the trials of all kernels that could be served in the place of the verdict's.
    """

    verdict: Verdict
    explain: tuple[str, ...]
    confirmed: tuple[Trial, ...] = ()


def choose(
    repository: Repository, problem: Problem, *, cpu: Cpu, context: ExecutionContext
) -> Match:
    """Return the best-founded verdict for `problem` on `cpu` in `context`.

    What gives reason to doubt is the answer only where there is no other; it names no kernel.

    Raises:
        InvalidProblem: the problem multiplies nothing.
    """
    problem.check_work()
    explain: list[str] = []
    doubted: Verdict | None = None
    for look in _LADDER:
        lookup = look(repository, problem, cpu=cpu, context=context)
        explain.append(lookup.reason)
        if lookup.verdict is not None and (doubt := lookup.verdict.doubt):
            doubted = doubted or lookup.verdict
            explain.append(f"not believed: {doubt}.")
        elif lookup.verdict is not None:
            return Match(
                verdict=lookup.verdict,
                explain=(*explain, _say(lookup.verdict), *_tell_baseline(lookup.verdict)),
                confirmed=lookup.confirmed,
            )
    imported = len(repository.trials(problem=problem, origin=Origin.IMPORTED))
    if imported:
        explain.append(
            f"imported: {imported} records from elsewhere are not served before a sweep here."
        )
    if doubted is not None:
        explain.append(
            f"{doubted.decision.value}: nothing is decided by such a measurement, so no kernel is "
            'named; run "gemm-tuner sweep" again to measure it anew.'
        )
        return Match(verdict=doubted, explain=tuple(explain))
    explain.append('baseline: nothing is known; run "gemm-tuner sweep" to tune it here.')
    verdict = no_verdict(problem, cpu_key=cpu.exact_key, context=context)
    return Match(verdict=verdict, explain=tuple(explain))


def _tell_baseline(verdict: Verdict) -> tuple[str, ...]:
    """Return by what the baseline computed, and what it was chosen from, where that is known."""
    measured = verdict.measurement
    if measured is None or not measured.implementation:
        return ()
    told = f"the baseline: {measured.baseline}, by {measured.implementation}"
    others = [
        f"{one.baseline} ({one.call_ns / 1e3:.3g} µs)" if one.baseline else f"not {one.package}"
        for one in measured.raced
    ]
    return (f"{told}; raced: {', '.join(others)}." if others else f"{told}.",)


def _say(verdict: Verdict) -> str:
    ratio = verdict.ratio
    if verdict.basis is Basis.PREDICTED:
        return f"{verdict.decision.value}: expected to be fast, not measured."
    if verdict.basis is Basis.SAME_MODEL:
        return f"{verdict.decision.value}: its speed over the baseline is not known here."
    if ratio is None:
        return f"{verdict.decision.value}: not measured for m = {verdict.problem.m.text}."
    unserved = f"; no kernel is named, because {why_not_served(ratio)}"
    return (
        f"{verdict.decision.value}: {speed_text(ratio)}"
        f"{'' if verdict.artifact else unserved}"
        f"{'' if verdict.complete else '; the sweep did not come to its end'}."
    )
