"""The rung for a range of m: a kernel tuned for a range that holds the m that was asked."""

from dataclasses import replace

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage
from gemm_tuner.domain.verdict import Basis
from gemm_tuner.select.rung import Rung, servable_verdict
from gemm_tuner.store.repository import Repository


def bucket(
    repository: Repository, problem: Problem, *, cpu: Cpu, context: ExecutionContext
) -> Rung:
    """Look for the narrowest range of m measured on this CPU that holds the m of `problem`."""
    ranges = [
        known.m
        for known in repository.ranges_of(problem)
        if problem.m.low in known.m and problem.m.high in known.m
    ]
    for rows in sorted(ranges, key=lambda rows: (rows.high - rows.low, rows.low)):
        trials = repository.trials(
            problem=replace(problem, m=rows),
            cpu_key=cpu.exact_key,
            context=context,
            stage=Stage.FINAL,
        )
        verdict = servable_verdict(repository, trials, problem=problem, cpu=cpu, basis=Basis.BUCKET)
        if verdict:
            return Rung(verdict=verdict, reason=f"bucket: measured for m = {rows.text}.")
    reason = f"bucket: no kernel measured here for a range of m that holds {problem.m.text}."
    return Rung(verdict=None, reason=reason)
