"""The estimate of a sweep, without running it."""

from collections.abc import Sequence

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.estimate import Estimate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import NOMINAL_CLOCK_HZ, predict_cycles
from gemm_tuner.tuning.sampling import CONFIRMED, confirming_s, most_finalists


def estimate(
    problem: Problem, contexts: Sequence[ExecutionContext], cpu: Cpu, budget_s: float
) -> Estimate:
    """Return the size of the search space and the longest time of a sweep, without running it.

    The end of a sweep, where finalists are confirmed, may exceed the budget of a slow problem. On a
    machine that does other work, parts of it may be timed twice.

    Raises:
        InvalidInput: no sweep takes the problem in these contexts.
    """
    problem.check_work(*(context.regime for context in contexts))
    space = Space(problem=problem, cpu=cpu, threads=contexts[0].threads)
    call_s = predicted_call_s(space)
    longest_s = confirming_s(
        call_s,
        budget_s,
        threads=space.threads,
        finalists=most_finalists(call_s=call_s, budget_s=budget_s) + (space.threads > 1),
        confirmed=CONFIRMED,
    )
    seconds = budget_s + len(contexts) * longest_s
    return Estimate(candidates=space.size(), seconds=seconds)


def predicted_call_s(space: Space) -> float:
    """Return the least time of a call that the model predicts, in seconds."""
    fastest = min(
        predict_cycles(space.problem, one, family_named(one.micro_kernel.family), space.cpu)
        for one in space.defaults()
    )
    return fastest / NOMINAL_CLOCK_HZ


def estimate_job(
    problem: Problem, context: ExecutionContext, cpu: Cpu, budget_s: float
) -> Estimate:
    """Return the size of the sweep of one context, as `estimate` does."""
    return estimate(problem, (context,), cpu, budget_s)
