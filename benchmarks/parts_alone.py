"""Print how evenly kernels that were tuned for one thread are cut for pools of many.

    python benchmarks/parts_alone.py [--dtype f32] [--layers benchmarks/layers.csv]
                                     [--seconds 540] [--write]

Each part of a call is run alone on one core, again and again, so that its x, its part of w and of
y are as near as they can be. Printed is the time of the whole call over that of the largest part:
the speed-up of a pool whose threads do not disturb each other. Shared caches, memory and the pool
itself are not in it. "Sum" is the time of all parts over that of the whole call, for the number of
parts for which it is largest. "Pool of 2" is the time of a call in one thread over that in two
threads of the package's pool, on two cores. Tiles stay whole, so where there are fewer than parts,
some parts are idle.

A kernel is the winner of the records that ship with the package, for one thread and weights in
cache; where there is none, the one that is tried first. A part is compared with the whole call
just before and after, since cores change their speed; shares and ratios are medians of the rounds.
`--write` also puts the table into docs/scaling.md.
"""

import time
from collections.abc import Iterator, Sequence
from math import ceil
from statistics import median

from markdown_tables import table_head, table_row
from scaling_page import Layer, best, layers_of, machine_text, parse_options, write_section

from gemm_tuner.bench.parts import PartsTimer
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.space.candidates import Space

PARTS = (2, 4, 8, 16, 32, 64, 128)
ROUNDS = 9
POOL_SAMPLES = 3
# Those of which it is known how the parts were before they were cut at the call.
EXTRA = ("f32 1024x1024x1024", "f32 128x3072x768", "f32 16x4096x4096")
SLICED = ("f32 1x4096x4096", 16)  # tuned for so many threads
COLUMNS = ("Layer", "Kernel", "Tiles", *(f"{parts} parts" for parts in PARTS), "Sum")
LAST_COLUMN = "Pool of 2"

Phases = list[list[float]]  # of each phase, a number for each part


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each layer."""
    options = parse_options(__doc__, arguments)
    end_s = time.monotonic() + options.seconds
    layers = [*_extra(), *layers_of(options.layers, options.dtype)]
    lines = list(table_head((*COLUMNS, LAST_COLUMN)))
    print("\n".join(lines), flush=True)
    for number, layer in enumerate(layers):
        budget_s = (end_s - time.monotonic()) / (len(layers) - number)
        lines.append(_row(layer, layer.timer(), budget_s))
        print(lines[-1], flush=True)
    if options.write:
        write_section("parts alone", "\n".join([f"{machine_text()}.", "", *lines]))


def _extra() -> Iterator[Layer]:
    for text in EXTRA:
        problem = Problem.parse(text)
        yield Layer(name=text, problem=problem, candidate=best(problem))
    text, threads = SLICED
    problem = Problem.parse(text)
    space = Space(problem=problem, cpu=detect_cpu(), threads=threads)
    sliced = [one for one in space.defaults() if one.blocking.grid_k > 1]
    if sliced:
        yield Layer(name=f"{text} for {threads} threads", problem=problem, candidate=sliced[0])


def _row(layer: Layer, timer: PartsTimer, budget_s: float) -> str:
    """Return the row of a layer, from as many rounds as there is time for."""
    shares: dict[int, list[Phases]] = {parts: [] for parts in PARTS}
    pool: list[float] = []
    begin_s = time.monotonic()
    for turn in range(ROUNDS):
        for parts in PARTS:
            shares[parts].append(_shares(timer, parts))
        pool += [
            timer.call_ns(1, Regime.HOT) / timer.call_ns(2, Regime.HOT)
            for _sample in range(POOL_SAMPLES)
        ]
        spent_s = time.monotonic() - begin_s
        if spent_s / (turn + 1) * (turn + 2) > budget_s:
            break
    usual = {parts: _medians(rounds) for parts, rounds in shares.items()}
    return table_row(
        layer.name,
        f"`{layer.candidate.text}`",
        str(_tiles(layer)),
        *(f"{1 / sum(map(max, usual[parts])):.1f}" for parts in PARTS),
        f"{max(sum(map(sum, usual[parts])) for parts in PARTS):.2f}",
        f"{median(pool):.2f}",
    )


def _shares(timer: PartsTimer, parts: int) -> Phases:
    """Return the time of each part in that of the whole call, timed just before and after them."""

    def whole_ns() -> float:
        return sum(phase[0] for phase in timer.times_ns(1, [(0,)]))

    before_ns = whole_ns()
    times_ns = timer.times_ns(parts, [(part,) for part in range(parts)])
    whole = (before_ns + whole_ns()) / 2
    return [[part / whole for part in phase] for phase in times_ns]


def _medians(rounds: Sequence[Phases]) -> Phases:
    return [
        [median(part) for part in zip(*phases, strict=True)] for phases in zip(*rounds, strict=True)
    ]


def _tiles(layer: Layer) -> int:
    tile, problem = layer.candidate.micro_kernel, layer.problem
    return ceil(problem.m.high / tile.mr) * ceil(problem.n / tile.nr)


if __name__ == "__main__":
    main()
