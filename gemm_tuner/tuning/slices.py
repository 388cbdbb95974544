"""Slow problems: their candidates race on a smaller problem, whose time predicts the whole."""

from dataclasses import replace

from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.rows import Rows
from gemm_tuner.space.candidates import Space
from gemm_tuner.tuning.estimate import predicted_call_s

# Races of calls that take longer, as the model predicts it, are on a part of the problem, whose
# calls do not. Smaller parts order candidates worse: docs/decisions/0074.
SLOW_CALL_S = 0.04
_SLOWEST_FLOP_PER_S = 1e9  # of a core without vectors: what needs less is not slow
_LEAST = 64  # rows and columns: tiles and blocks must look as in the whole


def slice_of(space: Space) -> Problem | None:
    """Return a part of a slow problem: fewer rows of x or columns of w, and all of k.

    The longer side is halved until calls are short enough, so that the part is as compact as what a
    thread of several would get. There is none of a problem that is not slow, or whose k alone is
    long. It follows from the problem and the CPU alone, so that the next sweep takes the same.

    Raises:
        NoKernelFamily: no family covers the problem on this CPU.
    """
    problem = space.problem
    if problem.flop(problem.m.high) < SLOW_CALL_S * _SLOWEST_FLOP_PER_S:
        return None
    call_s = predicted_call_s(space)
    rows, columns = problem.m.high, problem.n
    while call_s > SLOW_CALL_S and max(rows, columns) >= 2 * _LEAST:
        if rows > columns:
            rows = (rows + 1) // 2
        else:
            columns = (columns + 1) // 2
        call_s /= 2
    is_range = problem.columns.low < columns
    part = replace(
        problem,
        m=Rows(low=min(problem.m.low, rows), high=rows),
        n=columns,
        least_n=problem.least_n if is_range else None,
    )
    return None if part == problem else part
