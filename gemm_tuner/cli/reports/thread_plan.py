"""Where the threads of a call run, and what they share: part of `gemm-tuner cpu`."""

from functools import partial
from typing import Any

from gemm_tuner.cli.terminal.output import print_line, print_table
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.topology import Level, Plan
from gemm_tuner.domain.units import bytes_text, counted
from gemm_tuner.machine.system import cpus_text
from gemm_tuner.scaling.shares import Shares, shares_of
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.cores import core_of
from gemm_tuner.space.model import predict_cycles

_COLUMNS = (">socket", ">NUMA node", ">L3 group", ">threads", "CPUs", ">L3 for each thread")


def print_plan(plan: Plan, cpu: Cpu) -> None:
    """Print the CPUs that threads take, by what they share, and the bandwidth they have."""
    groups = plan.groups(Level.L3_GROUP)
    print_table(
        f"A plan for {counted(len(plan.places), 'thread')}",
        _COLUMNS,
        [
            (
                str(cpus[0].socket),
                str(cpus[0].node),
                str(group),
                str(len(cpus)),
                cpus_text(frozenset(one.number for one in cpus)),
                bytes_text(cpu.caches.l3_bytes // len(cpus)),
            )
            for group, cpus in groups.items()
        ],
    )
    rates = _bandwidths(plan, cpu)
    core = core_of(cpu)
    name = core.cpu.brand if core.is_of(cpu) else f"{core.cpu.brand}, which stands for this CPU"
    link = (
        f", {rates['link_gb_s']:.0f} between two sockets" if rates["link_gb_s"] is not None else ""
    )
    print_line(
        f"\nTogether they read {rates['l3_gb_s']:.0f} GB/s from L3 and {rates['memory_gb_s']:.0f} "
        f"from memory at most{link} (the table's {name})."
    )


def print_cut(problem: Problem, candidate: Candidate, shares: Shares) -> None:
    """Print how a call is cut among threads."""
    parts = len(shares.parts)
    idle = sum(not part.pieces for part in shares.parts)
    print_line(
        f"{problem.text} in {counted(parts, 'part')}, by the kernel to try first, "
        f"{candidate.text}:\ncut {shares.text}; the largest part has "
        f"{shares.largest_over_mean:.2f} times the mean"
        f"{f'; idle parts: {idle}' if idle else ''}."
    )


def plan_facts(plan: Plan, cpu: Cpu) -> dict[str, Any]:
    """Return a plan as JSON facts."""
    return {
        "threads": len(plan.places),
        "groups": [
            {
                "socket": cpus[0].socket,
                "node": cpus[0].node,
                "l3_group": group,
                "cpus": [one.number for one in cpus],
            }
            for group, cpus in plan.groups(Level.L3_GROUP).items()
        ],
        **_bandwidths(plan, cpu),
    }


def cut_facts(problem: Problem, candidate: Candidate, shares: Shares) -> dict[str, Any]:
    """Return how a call is cut as JSON facts."""
    return {
        "problem": problem.text,
        "candidate": candidate.text,
        "cut": shares.text,
        "largest_over_mean": shares.largest_over_mean,
        "idle_parts": sum(not part.pieces for part in shares.parts),
    }


def first_cut(problem: Problem, cpu: Cpu, threads: int) -> tuple[Candidate, Shares]:
    """Return the kernel to try first for a problem, and how it cuts the largest call."""
    candidates = Space(problem=problem, cpu=cpu).defaults()
    best = min(candidates, key=partial(_cycles, problem, cpu))
    return best, shares_of(problem, best, m=problem.m.high, parts=threads)


def _cycles(problem: Problem, cpu: Cpu, candidate: Candidate) -> float:
    family = family_named(candidate.micro_kernel.family)
    return predict_cycles(problem, candidate, family, cpu)


def _bandwidths(plan: Plan, cpu: Cpu) -> dict[str, float | None]:
    """Return what threads read together, by the table of cores; each core has its own limit."""
    core = core_of(cpu)
    shared, sockets = core.shared, plan.groups(Level.SOCKET)

    def of_cores(bytes_per_cycle: float, level: Level) -> list[float]:
        return [
            len({one.core for one in cpus}) * bytes_per_cycle * core.clock_hz / 1e9
            for cpus in plan.groups(level).values()
        ]

    from_l3 = of_cores(core.rates.l3_bytes, Level.L3_GROUP)
    from_memory = of_cores(core.rates.memory_bytes, Level.L3_GROUP)
    of_groups = sum(min(shared.group_gb_s, one) for one in from_memory)
    return {
        "l3_gb_s": sum(min(shared.l3_gb_s, one) for one in from_l3),
        "memory_gb_s": min(of_groups, shared.socket_gb_s * len(sockets)),
        "link_gb_s": shared.link_gb_s if len(sockets) > 1 else None,
    }
