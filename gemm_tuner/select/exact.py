"""The rungs for the very problem that was asked: on this CPU, then on its siblings."""

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage
from gemm_tuner.domain.verdict import Basis
from gemm_tuner.select.rung import Rung, servable_verdict
from gemm_tuner.store.repository import Repository


def exact(repository: Repository, problem: Problem, *, cpu: Cpu, context: ExecutionContext) -> Rung:
    """Look for `problem` measured on exactly this CPU."""
    trials = repository.trials(
        problem=problem, cpu_key=cpu.exact_key, context=context, stage=Stage.FINAL
    )
    verdict = servable_verdict(repository, trials, problem=problem, cpu=cpu, basis=Basis.MEASURED)
    found = "measured" if verdict else "no kernel measured in this store"
    return Rung(verdict=verdict, reason=f"exact: {found} on {cpu.exact_key}.")


def sibling(
    repository: Repository, problem: Problem, *, cpu: Cpu, context: ExecutionContext
) -> Rung:
    """Look for `problem` measured on another CPU of the same micro-architecture class."""
    trials = [
        trial
        for trial in repository.trials(
            problem=problem, class_key=cpu.class_key, context=context, stage=Stage.FINAL
        )
        if trial.cpu.exact_key != cpu.exact_key
    ]
    if trials:
        latest_key = trials[-1].cpu.exact_key
        trials = [trial for trial in trials if trial.cpu.exact_key == latest_key]
        verdict = servable_verdict(
            repository, trials, problem=problem, cpu=cpu, basis=Basis.SIBLING
        )
        if verdict:
            reason = f"sibling: measured on {latest_key}, so stale until measured here."
            return Rung(verdict=verdict, reason=reason)
    reason = f"sibling: no kernel measured in this store on the class {cpu.class_key}."
    return Rung(verdict=None, reason=reason)
