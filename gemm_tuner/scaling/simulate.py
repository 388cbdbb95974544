"""Predict a call in many threads from its parts: the slowest, what all share, and the barriers.

Each part has a time of its own: measured alone on a core here, or predicted for another. What parts
share bounds their time together: bytes over the bandwidth of an L3, of a group's way to memory, of
a socket's memory and of the link between sockets. A phase takes the longest of these, and a barrier
comes after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.topology import Level
from gemm_tuner.scaling.server import Server
from gemm_tuner.scaling.shares import Shape, shares_of
from gemm_tuner.scaling.traffic import Traffic, problems_of_shape
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import compute_cycles, predict_cycles, summed_cycles

# A loss below this share of the time is not what bounds a call.
_SMALL_LOSS = 0.1


class Bound(StrEnum):
    """What bounds the time of a call, in the words of the table."""

    COMPUTE = "compute"
    L3 = "L3"
    MEMORY = "memory"
    LINK = "link"
    UNEVEN = "uneven parts"
    BARRIER = "barrier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A call in `threads` threads: its time, the summands of it, and what bounds it.

    `work_ns` is the mean part, `uneven_ns` what the slowest takes longer, `waiting_ns` what all
    wait longer for what they share. Bytes are those of all parts.
    """

    threads: int
    cut: str
    work_ns: float
    uneven_ns: float
    waiting_ns: float
    barrier_ns: float
    bound: Bound
    l3_bytes: float
    memory_bytes: float
    link_bytes: float

    @property
    def time_ns(self) -> float:
        """Return the time of the call."""
        return self.work_ns + self.uneven_ns + self.waiting_ns + self.barrier_ns


def traffic_of(
    problem: Problem, candidate: Candidate, server: Server, *, threads: int, m: int, regime: Regime
) -> Traffic:
    """Return how a call with `m` rows is cut among threads of a server, and what they read.

    Raises:
        NotEnoughCpus: the server has fewer CPUs.
    """
    return Traffic(
        problem=problem,
        candidate=candidate,
        server=server,
        shares=shares_of(problem, candidate, m=m, parts=threads),
        plan=server.topology.plan(threads),
        regime=regime,
    )


def simulated(traffic: Traffic, part_ns: Sequence[Sequence[float]]) -> Simulated:
    """Return the time of a call, given that of each of its parts alone, for each phase."""
    threads = len(traffic.plan.places)
    # The first phase reads x and w; the second adds up the sums of slices.
    shared_ns, waits_for = max(_shared_ns(traffic))
    longest_ns = [max(times) for times in part_ns]
    work_ns = sum(sum(times) / threads for times in part_ns)
    waiting_ns = max(0.0, shared_ns - longest_ns[0])
    uneven_ns = max(0.0, sum(longest_ns) - work_ns)
    barrier_ns = traffic.server.barrier_ns(traffic.plan) * len(part_ns)
    time_ns = work_ns + uneven_ns + waiting_ns + barrier_ns
    losses = [(uneven_ns, Bound.UNEVEN), (barrier_ns, Bound.BARRIER), (waiting_ns, waits_for)]
    loss_ns, loss = max(losses)
    return Simulated(
        threads=threads,
        cut=traffic.shares.text,
        work_ns=work_ns,
        uneven_ns=uneven_ns,
        waiting_ns=waiting_ns,
        barrier_ns=barrier_ns,
        bound=loss if loss_ns > _SMALL_LOSS * time_ns else _bound_of_core(traffic),
        l3_bytes=sum(l3_bytes for l3_bytes, _memory_bytes in traffic.of_parts),
        memory_bytes=sum(traffic.memory_bytes(group) for group in traffic.groups.values()),
        link_bytes=traffic.link_bytes,
    )


def predicted_part_ns(traffic: Traffic) -> list[list[float]]:
    """Return the time of each part by the model of `space/model.py`, for each phase."""
    problem, candidate = traffic.problem, traffic.candidate
    family = family_named(candidate.micro_kernel.family)
    clock_ghz = traffic.server.core.clock_hz / 1e9
    whole, caches = _whole(candidate), traffic.server.cpu.caches

    @cache
    def cycles_of(shape: Shape, sharers: int) -> float:
        own = replace(caches, l3_bytes=caches.l3_bytes // sharers)
        cpu = replace(traffic.server.cpu, caches=own)
        is_cold = traffic.regime is Regime.COLD_WEIGHTS
        return sum(
            predict_cycles(
                piece, whole, family, cpu, memory_bytes=piece.w_bytes if is_cold else 0.0
            )
            for piece in problems_of_shape(problem, shape)
        )

    ones = [0.0] * len(traffic.shares.parts)
    for group in traffic.groups.values():
        for part in group:
            cycles = cycles_of(traffic.shares.parts[part].shape, len(group))
            ones[part] = max(cycles, *_reading_cycles(traffic, part)) / clock_ghz
    if candidate.blocking.grid_k == 1:
        return [ones]
    sums = summed_cycles(problem, candidate, family) if traffic.shares.slices > 1 else 0.0
    return [ones, [sums / clock_ghz / len(ones)] * len(ones)]


def _whole(candidate: Candidate) -> Candidate:
    """Return the kernel as it computes one part."""
    return replace(candidate, blocking=replace(candidate.blocking, grid_m=1, grid_n=1, grid_k=1))


def _shared_ns(traffic: Traffic) -> list[tuple[float, Bound]]:
    """Return how long each thing that parts share takes for the bytes of all of them."""
    shared = traffic.server.core.shared
    groups = traffic.groups
    from_memory = {name: traffic.memory_bytes(parts) for name, parts in groups.items()}
    of_l3 = max(sum(traffic.of_parts[part][0] for part in parts) for parts in groups.values())
    of_sockets: dict[int, float] = {}
    for name, cpus in traffic.plan.groups(Level.L3_GROUP).items():
        of_sockets[cpus[0].socket] = of_sockets.get(cpus[0].socket, 0.0) + from_memory[name]
    return [
        (of_l3 / shared.l3_gb_s, Bound.L3),
        (max(from_memory.values()) / shared.group_gb_s, Bound.MEMORY),
        (max(of_sockets.values()) / shared.socket_gb_s, Bound.MEMORY),
        (traffic.link_bytes / shared.link_gb_s if shared.link_gb_s else 0.0, Bound.LINK),
    ]


def _reading_cycles(traffic: Traffic, part: int) -> tuple[float, float]:
    """Return how long one core alone reads what a part gets from L3, and from memory."""
    rates = traffic.server.core.rates
    l3_bytes, memory_bytes = traffic.of_parts[part]
    return l3_bytes / rates.l3_bytes, memory_bytes / rates.memory_bytes


def _bound_of_core(traffic: Traffic) -> Bound:
    """Return what bounds most parts on a core of their own."""
    family = family_named(traffic.candidate.micro_kernel.family)
    rates = traffic.server.core.rates
    whole = _whole(traffic.candidate)
    compute_of = {
        shape: sum(
            compute_cycles(piece, whole, family, rates)
            for piece in problems_of_shape(traffic.problem, shape)
        )
        for shape in {share.shape for share in traffic.shares.parts}
    }
    compute, l3, memory = 0.0, 0.0, 0.0
    for part, share in enumerate(traffic.shares.parts):
        of_l3, of_memory = _reading_cycles(traffic, part)
        compute += compute_of[share.shape]
        l3 += of_l3
        memory += of_memory
    return max((compute, Bound.COMPUTE), (l3, Bound.L3), (memory, Bound.MEMORY))[1]
