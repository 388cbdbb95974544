"""The order of kernels for a number of threads that need not be here."""

from collections.abc import Iterable

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.scaling.server import Server
from gemm_tuner.scaling.simulate import Simulated, predicted_part_ns, simulated, traffic_of


def ranked_for_threads(
    candidates: Iterable[Candidate],
    problem: Problem,
    server: Server,
    *,
    threads: int,
    m: int,
    regime: Regime,
) -> list[tuple[Candidate, Simulated]]:
    """Return the candidates with their predicted calls of `m` rows, the fastest first.

    Of those that wait for the same bytes, the one whose parts have the least work comes first.
    """
    found = []
    for candidate in candidates:
        traffic = traffic_of(problem, candidate, server, threads=threads, m=m, regime=regime)
        found.append((candidate, simulated(traffic, predicted_part_ns(traffic))))
    return sorted(found, key=lambda one: (one[1].time_ns, one[1].work_ns, one[0].text))
