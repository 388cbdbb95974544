"""Print the time of one call of the smallest kernel, each way to call it, and beyond the kernel.

    python benchmarks/call_cost.py

The kernels compute relu(x @ w + bias) for one element of each. The first table is of whole calls,
with the loop around them. The second is of calls with `out=`. "Beyond the kernel" is the time of a
call, less that of the same kernel called as often from C on the same memory, less that of an empty
loop of Python. All three are timed in turn, and the medians are printed.
"""

import time
import timeit
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from platform import python_version
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.drivers import build_drivers
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.kernel_runner import KernelRunner
from gemm_tuner.bench.regimes import WeightCopies
from gemm_tuner.bench.workload import make_workload
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.direct import NATIVE
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.space.catalog import family_named

# The types of a problem, and the family of micro-kernels that computes it.
KINDS = {"f32": "scalar_f32", "bf16": "scalar_bf16", "int8": "scalar_int8"}

REPETITIONS = 9
SAMPLE_S = 0.1
SLEEPS = 500
ROUNDS = 301
CALLS = 5000
SEED = 1

# fmt: off
WAYS = {
    "out= given":                   "kernel(x, packed, out=out, bias=bias)",
    "out= given, threads=2":        "kernel(x, packed, out=out, bias=bias, threads=2)",
    "a new result":                 "kernel(x, packed, bias=bias)",
    "out= given, through ctypes":   "kernel.compute(x, packed, out=out, bias=bias)",
    "a new result, through ctypes": "kernel.compute(x, packed, bias=bias)",
}
# fmt: on


def main() -> None:
    """Time each way to call, and the time beyond the kernel, for the arrays of each library."""
    print(f"Python {python_version()}, NumPy {np.__version__}")
    if NATIVE is None:
        print("gemm_tuner.runtime._native is not built: all calls go through ctypes")
    timer = build_drivers(find_toolchain(), detect_cpu()).timer
    smallest = [Smallest(types, timer) for types in KINDS]
    print_ways(smallest[0])
    calls: dict[str, tuple[Smallest, Mapping[str, object]]] = {
        one.kernel.problem.text: (one, one.arrays) for one in smallest
    }
    if tensors := tensors_of(smallest[0].arrays):
        calls[f"{smallest[0].kernel.problem.text}, PyTorch"] = (smallest[0], tensors)
    print_beyond(calls)


class Smallest:
    """The kernel for one element, what it is called with, and how long it takes from C."""

    def __init__(self, types: str, timer: Path) -> None:
        family = family_named(KINDS[types])
        candidate = Candidate.parse(f"{family.name}_1x1 mc1_nc1_kc1 jc_ic_jr_ir")
        problem = Problem.parse(f"{types} 1x1x1 nk bias+relu")
        source = render(problem, candidate, family)
        built = compile_kernel(source, isa=family.isa, toolchain=find_toolchain())
        workload = make_workload(problem, make_inputs(problem, InputKind.NORMAL, SEED), threads=1)
        self.kernel = load_kernel(built.binary, artifact=built.artifact, cpu=detect_cpu())
        self.packed = self.kernel.pack(workload.w)
        self.arrays: Mapping[str, NDArray[Any]] = {
            "x": workload.x,
            "bias": workload.operands["bias"],
            "out": workload.y,
        }
        self._runner = KernelRunner(self.kernel.native, workload, timer)
        self._weights = WeightCopies(self._runner, 1, SEED)

    def names(self, arrays: Mapping[str, object]) -> dict[str, object]:
        """Return the call that each name in `WAYS` stands for."""
        return {"kernel": self.kernel, "packed": self.packed, **arrays}

    def sample_s(self, calls: int) -> float:
        """Return the time of some calls from C."""
        sample = self._runner.sample(self._weights.struct, warm_up_calls=1, timed_calls=calls)
        return int(sample.elapsed_ns) / 1e9


def tensors_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, object]:
    """Return tensors in the memory of the arrays, none if PyTorch is not installed."""
    try:
        import torch  # noqa: PLC0415 - it is not needed
    except ImportError:
        return {}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def print_ways(smallest: Smallest) -> None:
    """Print the time of a whole call in each way, and after a sleep."""
    print(smallest.kernel.problem.text)
    for name, way in WAYS.items():
        print(f"{name:46}{best_ns(way, smallest.names(smallest.arrays)):8.0f} ns")
    for threads in (1, 2):
        way = f"out= given, threads={threads}, after a sleep of 1 ms"
        x, out, bias = (smallest.arrays[name] for name in ("x", "out", "bias"))
        call = partial(smallest.kernel, x, smallest.packed, out=out, bias=bias, threads=threads)
        print(f"{way:46}{median_after_sleep_ns(call):8.0f} ns")
    if tensors := tensors_of(smallest.arrays):
        for name, way in WAYS.items():
            print(f"{name + ', PyTorch':46}{best_ns(way, smallest.names(tensors)):8.0f} ns")


def print_beyond(calls: Mapping[str, tuple[Smallest, Mapping[str, object]]]) -> None:
    """Print the times of calls, of the kernel in them, of the loop around them, and the rest."""
    timers = {
        name: timeit.Timer(WAYS["out= given"], globals=smallest.names(arrays))
        for name, (smallest, arrays) in calls.items()
    }
    loop = timeit.Timer("pass")
    rounds_s: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            kernel_s = calls[name][0].sample_s(CALLS)
            rounds_s[name].append((timer.timeit(CALLS), kernel_s, loop.timeit(CALLS)))
    print(f"{'out= given, ns of a call':46}{'call':>8}{'kernel':>8}{'loop':>8}{'beyond':>8}")
    for name, times_s in rounds_s.items():
        parts_s = [median(column_s) for column_s in zip(*times_s, strict=True)]
        beyond_s = median(call_s - kernel_s - loop_s for call_s, kernel_s, loop_s in times_s)
        columns = "".join(f"{one_s / CALLS * 1e9:8.1f}" for one_s in (*parts_s, beyond_s))
        print(f"{name:46}{columns}")


def best_ns(statement: str, names: dict[str, object]) -> float:
    """Return the time of a statement in its fastest sample, in ns, the loop around it included."""
    timer = timeit.Timer(statement, globals=names)
    count, elapsed_s = timer.autorange()
    samples = max(1, int(count * SAMPLE_S / elapsed_s))
    return min(timer.repeat(REPETITIONS, samples)) / samples * 1e9


def median_after_sleep_ns(call: Callable[[], object]) -> float:
    """Return the time of a call whose threads and caches have rested, in ns."""
    times_ns = []
    for _ in range(SLEEPS):
        time.sleep(0.001)
        begin_ns = time.perf_counter_ns()
        call()
        times_ns.append(time.perf_counter_ns() - begin_ns)
    return median(times_ns)


if __name__ == "__main__":
    main()
