"""The order of kernels for a number of threads that need not be here."""

from collections.abc import Iterable
from math import ceil

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.scaling.server import Server, server_like
from gemm_tuner.scaling.simulate import Simulated, predicted_part_ns, simulated, traffic_of
from gemm_tuner.space.cores import core_of
from gemm_tuner.space.ranking import ranked


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


def ranked_on_server(
    candidates: Iterable[Candidate], problem: Problem, cpu: Cpu, threads: int
) -> list[Candidate]:
    """Return the candidates as the model ranks them for so many threads on the core of `cpu`.

    Several threads run on as few sockets of the table as have the cores, with hot weights.
    """
    if threads == 1:
        return ranked(candidates, problem, cpu)
    core = core_of(cpu)
    server = server_like(core, sockets=ceil(threads / core.cpu.physical_cores), cpu=cpu)

    def predicted_ns(candidate: Candidate) -> float:
        traffic = traffic_of(
            problem,
            candidate,
            server,
            threads=threads,
            m=problem.m.high,
            regime=Regime.HOT,
        )
        return simulated(traffic, predicted_part_ns(traffic)).time_ns

    return ranked(candidates, problem, cpu, predicted_ns)
