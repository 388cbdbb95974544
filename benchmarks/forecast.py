"""Print what the simulation predicts of 64 cores of CPUs that are not here, and what bounds it.

    python benchmarks/forecast.py [--threads 64] [--targets zen5 sapphire_rapids] [--write]

Each layer has the kernel that the model ranks first for these threads, weights in the caches and
in memory. Nothing is timed. `--write` also puts the table into docs/scaling.md.
"""

import argparse
from collections.abc import Sequence
from math import ceil

from markdown_tables import table_head, table_row
from scaling_page import write_section

from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import time_text
from gemm_tuner.scaling.ranking import ranked_for_threads
from gemm_tuner.scaling.server import server_like
from gemm_tuner.scaling.simulate import predicted_part_ns, simulated, traffic_of
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.cores import core_named

LAYERS = (
    "f32 1x4096x4096",
    "f32 16x4096x4096",
    "f32 128x768x768 nk bias",
    "f32 128x3072x768 nk bias+gelu_erf",
    "f32 256x4096x4096",
    "f32 1024x1024x1024",
    "f32 2048x2048x2048",
    "bf16 1x4096x4096",
    "bf16 256x4096x4096",
    "bf16 2048x2048x2048",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each layer, target and regime."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--targets", nargs="+", default=["zen5", "sapphire_rapids"])
    parser.add_argument("--write", action="store_true", help="put the table into docs/scaling.md")
    options = parser.parse_args(arguments)
    columns = ("Layer", "Target", "Weights", "Cut", "Time", "Gflop/s", "Speed-up", "Bound by")
    lines = list(table_head(columns))
    lines += [
        _row(Problem.parse(text), target, options.threads, regime)
        for text in LAYERS
        for target in options.targets
        for regime in Regime
    ]
    print("\n".join(lines))
    if options.write:
        write_section("forecast", "\n".join(lines))


def _row(problem: Problem, target: str, threads: int, regime: Regime) -> str:
    core = core_named(target)
    server = server_like(core, sockets=ceil(threads / core.cpu.physical_cores))
    candidates = Space(problem=problem, cpu=server.cpu).defaults()
    rows = problem.m.high
    candidate, call = ranked_for_threads(
        candidates, problem, server, threads=threads, m=rows, regime=regime
    )[0]
    traffic = traffic_of(problem, candidate, server, threads=1, m=rows, regime=regime)
    alone = simulated(traffic, predicted_part_ns(traffic))
    return table_row(
        problem.text,
        target if server.topology.text.startswith("1 ") else f"{target}, two sockets",
        "hot" if regime is Regime.HOT else "cold",
        call.cut,
        time_text(call.time_ns),
        f"{problem.flop(rows) / call.time_ns:.0f}",
        f"{alone.time_ns / call.time_ns:.1f}",
        call.bound.value,
    )


if __name__ == "__main__":
    main()
