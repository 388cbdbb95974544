"""Print how evenly kernels that were tuned for one thread are cut for pools of many.

    python benchmarks/parts_alone.py [--dtype f32] [--layers benchmarks/layers.csv] [--seconds 600]

Each part of a call is run alone on one core, again and again, so that its x, its part of w and of
y are as near as they can be. Printed is the time of the whole call over that of the largest part:
the speed-up of a pool whose threads do not disturb each other. Shared caches, memory and the pool
itself are not in it. "Sum" is the time of all parts over that of the whole call, for the number of
parts for which it is largest. "Pool of 2" is the time of a call
from Python in one thread over that in two threads of the package's pool, on two cores. Tiles stay
whole, so where there are fewer than parts, some parts are idle.

A kernel is the winner of the records that ship with the package, for one thread and weights in
cache; where there is none, the one that is tried first. Times are the least of several rounds.
"""

import argparse
import csv
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil
from pathlib import Path

from gemm_tuner.abi import ArrayView, make_args
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.workload import Workload, make_workload
from gemm_tuner.build.compile import compile_hosted, compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.memory import address_of, allocate_aligned
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.select.recorded import recorded_winners, shipped_records_of
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import predict_cycles

PARTS = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST_FLOP = 10_000_000
ROUNDS = 5
LEAST_SAMPLE_NS = 100_000
POOL_SAMPLES = 3
POOL_SAMPLE_S = 0.002
SEED = 1
Timer = Callable[..., int]
# Those of which it is known how the parts were before they were cut at the call.
EXTRA = ("f32 1024x1024x1024", "f32 128x3072x768", "f32 16x4096x4096")
SLICED = ("f32 1x4096x4096", 16)  # tuned for so many threads

LOOP = """
#include <stdint.h>
#include <time.h>

typedef int32_t (*run_function)(const void *args, int32_t phase, int32_t part, int32_t parts);

/* Return the nanoseconds of `calls` calls of one part. */
int64_t time_part(run_function run, const void *args, int32_t phase, int32_t part, int32_t parts,
                  int64_t calls) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int64_t i = 0; i < calls; i++)
        run(args, phase, part, parts);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (end.tv_sec - begin.tv_sec) * INT64_C(1000000000) + end.tv_nsec - begin.tv_nsec;
}
"""


def main() -> None:
    """Print a row for each layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--layers", type=Path, default=Path(__file__).parent / "layers.csv")
    parser.add_argument("--seconds", type=float, default=600.0, help="of all layers together")
    options = parser.parse_args()
    timer = ctypes.CDLL(
        str(compile_hosted(LOOP, name="parts_alone", toolchain=find_toolchain()))
    ).time_part
    timer.restype = ctypes.c_int64
    kernels = [*_extra(), *_of_layers(options.layers, options.dtype)]
    end = time.monotonic() + options.seconds
    head = ("problem", "kernel", "tiles", *map(str, PARTS[1:]), "sum", "pool of 2")
    print(f"| {' | '.join(head)} |\n{'| --- ' * len(head)}|", flush=True)
    for number, (name, problem, candidate) in enumerate(kernels):
        kernel = _built(problem, candidate)
        budget_s = (end - time.monotonic()) / (len(kernels) - number)
        _print_row(name, kernel, timer, budget_s)


def _extra() -> Iterator[tuple[str, Problem, Candidate]]:
    for text in EXTRA:
        problem = Problem.parse(text)
        yield text, problem, _best(problem)
    problem = Problem.parse(SLICED[0])
    space = Space(problem=problem, cpu=detect_cpu(), threads=SLICED[1])
    sliced = [one for one in space.defaults() if one.blocking.grid_k > 1]
    if sliced:
        yield f"{SLICED[0]} for {SLICED[1]} threads", problem, sliced[0]


def _of_layers(path: Path, dtype: str) -> Iterator[tuple[str, Problem, Candidate]]:
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            sizes = f"{row['m']}x{row['n']}x{row['k']}"
            problem = Problem.parse(f"{dtype} {sizes} nk {row['epilogue']}")
            if problem.flop(problem.m.high) >= LEAST_FLOP:
                yield row["name"], problem, _best(problem)


def _best(problem: Problem) -> Candidate:
    """Return the winner that is recorded for one thread, or what is tried first."""
    space = Space(problem=problem, cpu=detect_cpu())
    records = shipped_records_of(problem, space.cpu)
    winners = recorded_winners(records, space, ExecutionContext()).candidates
    return winners[0] if winners else min(space.defaults(), key=partial(_cycles, problem))


def _cycles(problem: Problem, candidate: Candidate) -> float:
    family = family_named(candidate.micro_kernel.family)
    return predict_cycles(problem, candidate, family, detect_cpu())


def _built(problem: Problem, candidate: Candidate) -> Kernel:
    family = family_named(candidate.micro_kernel.family)
    source = render(problem, candidate, family)
    build = compile_kernel(source, isa=family.isa, toolchain=find_toolchain())
    return load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())


def _print_row(name: str, kernel: Kernel, timer: Timer, budget_s: float) -> None:
    inputs = make_inputs(kernel.problem, InputKind.NORMAL, SEED)
    call = _Call(kernel, make_workload(kernel.problem, inputs, threads=1), timer)
    asked = [(part, parts) for parts in PARTS for part in range(parts)]
    least: dict[tuple[int, int], float] = {}
    ones: list[float] = []
    twos: list[float] = []
    begin = time.monotonic()
    for turn in range(ROUNDS):
        for part, parts in asked:
            ns = call.time_part(part, parts)
            least[part, parts] = min(ns, least.get((part, parts), ns))
        for _sample in range(POOL_SAMPLES):
            ones.append(call.time_pool(1))
            twos.append(call.time_pool(2))
        spent_s = time.monotonic() - begin
        if spent_s / (turn + 1) * (turn + 2) > budget_s:
            break
    whole = least[0, 1]
    times = [[least[part, parts] for part in range(parts)] for parts in PARTS[1:]]
    speed_ups = [f"{whole / max(ns):.1f}" for ns in times]
    most = max(sum(ns) / whole for ns in times)
    pool = f"{min(ones) / min(twos):.2f}"
    cells = (name, kernel.candidate.text, str(_tiles(kernel)), *speed_ups, f"{most:.2f}", pool)
    print(f"| {' | '.join(cells)} |", flush=True)


def _tiles(kernel: Kernel) -> int:
    tile, problem = kernel.candidate.micro_kernel, kernel.problem
    return ceil(problem.m.high / tile.mr) * ceil(problem.n / tile.nr)


class _Call:
    """A call whose parts are timed."""

    def __init__(self, kernel: Kernel, workload: Workload, timer: Timer) -> None:
        self._kernel = kernel
        self._native = kernel.native
        self._timer = timer
        self._workload = workload
        self._packed = kernel.pack(
            workload.w, scales=workload.scales, zero_points=workload.zero_points
        )

    def time_part(self, part: int, parts: int) -> float:
        """Return the nanoseconds of one part, in all phases."""
        workload = self._workload
        workspace = allocate_aligned(self._native.workspace_bytes(parts))
        args = make_args(
            m=workload.rows,
            x=ArrayView(address_of(workload.x), workload.problem.k),
            packed_w=address_of(self._packed.memory),
            y=ArrayView(address_of(workload.y), workload.problem.n),
            operands=_operands(workload),
            workspace=address_of(workspace),
        )
        total = 0.0
        for phase in range(self._native.phases):
            which = (
                ctypes.c_void_p(self._native.run_address),
                ctypes.byref(args),
                phase,
                part,
                parts,
            )
            self._timer(*which, ctypes.c_int64(1))  # what is read first comes into the caches
            calls = max(1, LEAST_SAMPLE_NS // max(1, self._timer(*which, ctypes.c_int64(1))))
            total += self._timer(*which, ctypes.c_int64(calls)) / calls
        return total

    def time_pool(self, threads: int) -> float:
        """Return the seconds of a call from Python in the pool of the package."""
        workload = self._workload
        call = partial(
            self._kernel.compute,
            workload.x,
            self._packed,
            out=workload.y,
            threads=threads,
            **workload.operands,
        )
        call()
        begin = time.perf_counter()
        calls = 0
        while time.perf_counter() - begin < POOL_SAMPLE_S:
            call()
            calls += 1
        return (time.perf_counter() - begin) / calls


def _operands(workload: Workload) -> Sequence[ArrayView]:
    n = workload.problem.n
    return [
        ArrayView(address_of(array), n if array.size > n else 0)
        for array in workload.operands.values()
    ]


if __name__ == "__main__":
    main()
