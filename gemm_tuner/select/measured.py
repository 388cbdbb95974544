"""The steps for exactly the problem asked: on this CPU, then on its siblings."""

from collections.abc import Collection

from gemm_tuner.answer.telling import measured_here
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.record import Stage
from gemm_tuner.domain.verdict import Basis
from gemm_tuner.select.lookup import Lookup, Question, Source, stored


def exact(question: Question) -> Lookup:
    """Look for the problem measured on exactly this CPU."""
    key, here = question.cpu.exact_key, question.known.here
    source = Source(problem=question.problem, cpu_key=key)
    verdict, from_trials = stored(question, source, here, Basis.MEASURED) if here else (None, False)
    if verdict:
        reason = measured_here(key)
        return Lookup(verdict=verdict, reason=reason, source=source, from_trials=from_trials)
    told = _what_there_is(question) if here else ""
    return Lookup(
        verdict=None,
        reason=f"exact: no kernel confirmed in this store on {key}{told}.",
        from_trials=here is not None,
    )


def _what_there_is(question: Question) -> str:
    """Return a clause on the trials of a problem that has no confirmed kernel."""
    repository, context = question.repository, question.context
    trials = [
        trial
        for trial in repository.trials(problem=question.problem, cpu_key=question.cpu.exact_key)
        if trial.context == context and trial.stage is not Stage.PREDICTED and not trial.emulated
    ]
    crowded = {trial.candidate for trial in trials if not trial.had_its_threads}
    if crowded:
        return (
            f"; {_count(crowded)} timed with {context.threads} threads where fewer CPUs were "
            "usable, which is not served"
        )
    tried = {trial.candidate for trial in trials}
    if tried:
        return (
            f"; {_count(tried)} tried there, by a sweep that was stopped or for a larger problem: "
            "sweep to go on"
        )
    return ""


def _count(candidates: Collection[Candidate]) -> str:
    return "1 candidate was" if len(candidates) == 1 else f"{len(candidates)} candidates were"


def sibling(question: Question) -> Lookup:
    """Look for the problem measured on another CPU of the same micro-architecture class."""
    is_from_trials = False
    for other in question.known.siblings:
        source = Source(problem=question.problem, cpu_key=other.cpu_key, of_class=True)
        verdict, from_trials = stored(question, source, other, Basis.SIBLING)
        is_from_trials |= from_trials
        if verdict:
            reason = f"sibling: measured on {other.cpu_key}, so stale until measured here."
            return Lookup(verdict=verdict, reason=reason, source=source, from_trials=is_from_trials)
    class_key = question.cpu.class_key
    reason = f"sibling: no kernel confirmed in this store on the class {class_key}."
    return Lookup(verdict=None, reason=reason, from_trials=is_from_trials)
