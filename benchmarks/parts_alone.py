"""Print how evenly kernels that were tuned for one thread are cut for pools of many.

    python benchmarks/parts_alone.py [--dtype f32] [--layers benchmarks/layers.csv]
                                     [--seconds 540] [--write]

Each part of a call is run alone on one core, again and again, so that its x, its part of w and of
y are as near as they can be. Printed is the time of the whole call over that of the largest part:
the speed-up of a pool whose threads do not disturb each other. Shared caches, memory and the pool
itself are not in it. "Sum" is the time of all parts over that of the whole call, where it is
largest. "Pool of 2" is the time of a call in one thread over that in two threads of the package's
pool, on two cores. Tiles stay whole, so where there are fewer than parts, some parts are idle:
"Sum", and what is said of all layers at the end, leave out where y has less than four tiles for
each part.

A kernel is what won on this CPU model for one thread and weights in cache, by the local database
or else by the records that ship with the package; where none has won, the one that is tried first.
Cores change their speed within seconds: parts are compared with the whole calls just before and
after them, and what is printed is made of the medians of up to fifteen rounds. Layers that take
long come last, with the time that the others left. `--write` also puts the table into
docs/scaling.md.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
ROUNDS = 15
TILES_PER_PART = 4  # with fewer, whole tiles do not allow an even cut
WANTED = {16: 0.95, 64: 0.85}  # of a speed-up by the number of parts
# Those of which it is known how the parts were before they were cut at the call.
EXTRA = ("f32 1024x1024x1024", "f32 128x3072x768", "f32 16x4096x4096")
SLICED = ("f32 1x4096x4096", 16)  # tuned for so many threads
COLUMNS = ("Layer", "Kernel", "Tiles", *(f"{parts} parts" for parts in PARTS), "Sum")
LAST_COLUMN = "Pool of 2"

Phases = list[list[float]]  # of each phase, the share of each part in the whole call


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How a layer's kernel is shared: its speed-up in parts, and the sum of their times."""

    layer: Layer
    speed_ups: dict[int, float]
    sums: dict[int, float]  # over the time of the whole call
    pool_of_two: float

    @property
    def tiles(self) -> int:
        """Return of how many tiles y is."""
        tile, problem = self.layer.candidate.micro_kernel, self.layer.problem
        return ceil(problem.m.high / tile.mr) * ceil(problem.n / tile.nr)

    def can_be_even(self, parts: int) -> bool:
        """Say whether there are tiles enough for so many parts."""
        return self.tiles >= TILES_PER_PART * parts

    @property
    def row(self) -> str:
        """Return the row of the table."""
        sums = [self.sums[parts] for parts in PARTS if self.can_be_even(parts)]
        return table_row(
            self.layer.name,
            f"`{self.layer.candidate.text}`",
            str(self.tiles),
            *(f"{self.speed_ups[parts]:.1f}" for parts in PARTS),
            f"{max(sums):.2f}" if sums else "",
            f"{self.pool_of_two:.2f}",
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each layer, and what holds for all."""
    options = parse_options(__doc__, arguments)
    end_s = time.monotonic() + options.seconds
    layers = [*_extra(), *layers_of(options.layers, options.dtype)]
    layers.sort(key=lambda layer: layer.problem.flop(layer.problem.m.high))
    found = []
    lines = list(table_head((*COLUMNS, LAST_COLUMN)))
    print("\n".join(lines), flush=True)
    for number, layer in enumerate(layers):
        budget_s = (end_s - time.monotonic()) / (len(layers) - number)
        found.append(_scaling(layer, layer.timer(), budget_s))
        lines.append(found[-1].row)
        print(lines[-1], flush=True)
    summary = [_summary(found, parts, wanted) for parts, wanted in WANTED.items()]
    print("", *summary, sep="\n")
    if options.write:
        write_section("parts alone", "\n".join([f"{machine_text()}.", "", *lines, "", *summary]))


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


def _scaling(layer: Layer, timer: PartsTimer, budget_s: float) -> Scaling:
    """Return how a layer's kernel is shared, from as many rounds as there is time for."""
    shares: dict[int, list[Phases]] = {parts: [] for parts in PARTS}
    pool: list[float] = []
    begin_s = time.monotonic()
    for turn in range(ROUNDS):
        before_ns = _whole_ns(timer)
        for parts in PARTS:
            times_ns = timer.times_ns(parts, [(part,) for part in range(parts)])
            after_ns = _whole_ns(timer)
            usual_ns = (before_ns + after_ns) / 2
            shares[parts].append([[part / usual_ns for part in phase] for phase in times_ns])
            before_ns = after_ns
        pool.append(timer.call_ns(1, Regime.HOT) / timer.call_ns(2, Regime.HOT))
        spent_s = time.monotonic() - begin_s
        if spent_s / (turn + 1) * (turn + 2) > budget_s:
            break
    usual = {parts: _medians(rounds) for parts, rounds in shares.items()}
    return Scaling(
        layer=layer,
        speed_ups={parts: 1 / sum(map(max, usual[parts])) for parts in PARTS},
        sums={parts: sum(map(sum, usual[parts])) for parts in PARTS},
        pool_of_two=median(pool),
    )


def _whole_ns(timer: PartsTimer) -> float:
    return sum(phase[0] for phase in timer.times_ns(1, [(0,)]))


def _medians(rounds: Sequence[Phases]) -> Phases:
    return [
        [median(part) for part in zip(*phases, strict=True)] for phases in zip(*rounds, strict=True)
    ]


def _summary(found: Sequence[Scaling], parts: int, wanted: float) -> str:
    """Say how many layers are as much faster in so many parts as wanted, and which are not."""
    even = [one for one in found if one.can_be_even(parts)]
    short = [one for one in even if one.speed_ups[parts] < wanted * parts]
    names = ", ".join(f"{one.layer.name} ({one.speed_ups[parts]:.2f})" for one in short)
    return (
        f"- {parts} parts: {len(even) - len(short)} of {len(even)} layers with "
        f"{TILES_PER_PART} tiles a part or more are at least {wanted * parts:.1f} times as fast as "
        f"the whole call{f'; not {names}' if names else ''}."
    )


if __name__ == "__main__":
    main()
