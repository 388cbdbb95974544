"""How much there is to try for a problem, and how long that takes."""

from collections.abc import Callable
from dataclasses import dataclass

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The size of a sweep: candidates in the space, and the longest time in seconds."""

    candidates: int
    seconds: float


# Of a problem in a context on a CPU, with a budget in seconds.
Estimator = Callable[[Problem, ExecutionContext, Cpu, float], Estimate]
