"""The model's favourites among the candidates of a space."""

from collections.abc import Iterable

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import predict_cycles


def ranked(candidates: Iterable[Candidate], problem: Problem, cpu: Cpu) -> list[Candidate]:
    """Return the candidates in the order in which the model expects them to be fast."""

    def predicted(candidate: Candidate) -> tuple[float, str]:
        family = family_named(candidate.micro_kernel.family)
        return predict_cycles(problem, candidate, family, cpu), candidate.text

    return sorted(candidates, key=predicted)


def shortlist(space: Space, count: int | None = None) -> list[Candidate]:
    """Return the `count` tiles that the model ranks first, each with the blocking to try first.

    All of them, in that order, if there is no count.

    Raises:
        NoKernelFamily: no family of the catalog covers the problem on this CPU.
    """
    return ranked(space.defaults(), space.problem, space.cpu)[:count]
