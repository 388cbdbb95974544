"""Choose one of several kernels that are equally fast."""

from collections.abc import Mapping

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import loads_per_multiplication

EQUALLY_FAST = 1.01


def sturdiest_of_fastest(speeds: Mapping[Candidate, float], problem: Problem) -> Candidate:
    """Return the sturdiest candidate of those within 1 % of the greatest speed.

    That is one of one part, then the one with the fewest loads for each multiplication: what comes
    from a cache may take longer beside other work. Of equal ones it is the simplest. So the same
    sweep gives the same answer twice.
    """
    greatest = max(speeds.values())
    equal = [one for one, speed in speeds.items() if speed * EQUALLY_FAST >= greatest]

    def sturdiness(candidate: Candidate) -> tuple[bool, float, int, str]:
        family = family_named(candidate.micro_kernel.family)
        loads = loads_per_multiplication(problem, candidate, family)
        return (candidate.parts > 1, loads, candidate.complexity, candidate.text)

    return min(equal, key=sturdiness)
