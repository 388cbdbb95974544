"""The steps for exactly the problem asked: on this CPU, then on its siblings."""

from collections.abc import Collection

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage
from gemm_tuner.domain.verdict import Basis
from gemm_tuner.select.lookup import Lookup, servable
from gemm_tuner.store.repository import Repository


def exact(
    repository: Repository, problem: Problem, *, cpu: Cpu, context: ExecutionContext
) -> Lookup:
    """Look for `problem` measured on exactly this CPU."""
    trials = repository.trials(problem=problem, cpu_key=cpu.exact_key, only_decisive=True)
    verdict, confirmed = servable(
        repository, trials, problem=problem, cpu=cpu, context=context, basis=Basis.MEASURED
    )
    if verdict:
        reason = f"exact: measured on {cpu.exact_key}."
        return Lookup(verdict=verdict, reason=reason, confirmed=confirmed)
    reason = f"exact: no kernel confirmed in this store on {cpu.exact_key}"
    return Lookup(
        verdict=None, reason=f"{reason}{_what_there_is(repository, problem, cpu, context)}."
    )


def _what_there_is(
    repository: Repository, problem: Problem, cpu: Cpu, context: ExecutionContext
) -> str:
    """Return a clause on the trials of a problem that has no confirmed kernel."""
    trials = [
        trial
        for trial in repository.trials(problem=problem, cpu_key=cpu.exact_key)
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
        return f"; {_count(tried)} tried there, so a sweep was stopped: sweep again to go on"
    return ""


def _count(candidates: Collection[Candidate]) -> str:
    return "1 candidate was" if len(candidates) == 1 else f"{len(candidates)} candidates were"


def sibling(
    repository: Repository, problem: Problem, *, cpu: Cpu, context: ExecutionContext
) -> Lookup:
    """Look for `problem` measured on another CPU of the same micro-architecture class."""
    trials = repository.trials(problem=problem, class_key=cpu.class_key, only_decisive=True)
    keys = dict.fromkeys(trial.cpu.exact_key for trial in reversed(trials))
    for key in [key for key in keys if key != cpu.exact_key]:
        # A kernel that failed on one CPU of the class is not trusted on another.
        of_key = [
            trial
            for trial in trials
            if trial.cpu.exact_key == key or trial.outcome is not Outcome.CORRECT
        ]
        verdict, confirmed = servable(
            repository, of_key, problem=problem, cpu=cpu, context=context, basis=Basis.SIBLING
        )
        if verdict:
            reason = f"sibling: measured on {key}, so stale until measured here."
            return Lookup(verdict=verdict, reason=reason, confirmed=confirmed)
    reason = f"sibling: no kernel confirmed in this store on the class {cpu.class_key}."
    return Lookup(verdict=None, reason=reason)
