"""The lookup for a range of m: a kernel tuned for a range that holds the m that was asked."""

from dataclasses import replace

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.select.lookup import Lookup, servable
from gemm_tuner.store.repository import Repository


def bucket(
    repository: Repository, problem: Problem, *, cpu: Cpu, context: ExecutionContext
) -> Lookup:
    """Look for the narrowest range of m measured on this CPU that holds the m of `problem`.

    A range is timed at its greatest m. What was measured there is claimed for that m alone; for
    any other the kernel, if it was as fast as the baseline, is a tie without a ratio.
    """
    ranges = [
        known.m
        for known in repository.ranges_of(problem)
        if problem.m.low in known.m and problem.m.high in known.m
    ]
    for rows in sorted(ranges, key=lambda rows: (rows.high - rows.low, rows.low)):
        verdict, confirmed = servable(
            repository,
            repository.trials(
                problem=replace(problem, m=rows), cpu_key=cpu.exact_key, only_decisive=True
            ),
            problem=problem,
            cpu=cpu,
            context=context,
            basis=Basis.BUCKET,
        )
        if verdict is None:
            continue
        reason = f"bucket: tuned for m = {rows.text}, measured at m = {rows.high}"
        if problem.m.high == rows.high:
            return Lookup(verdict=verdict, reason=f"{reason}.", confirmed=confirmed)
        if verdict.artifact is not None:
            unmeasured = replace(verdict, decision=Decision.TIE, measurement=None)
            reason = f"{reason}, so its speed at m = {problem.m.text} is not known."
            return Lookup(verdict=unmeasured, reason=reason)
    reason = f"bucket: no kernel confirmed here for a range of m that holds {problem.m.text}."
    return Lookup(verdict=None, reason=reason)
