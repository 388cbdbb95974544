"""Print what one call of the smallest kernel takes, by each way to call it.

    python tests/bench/call_cost.py

The kernel computes relu(x @ w + bias) for one element of each: nearly all of a call is what is
around the kernel. The kernel's own few nanoseconds are counted in.
"""

import time
import timeit
from collections.abc import Callable
from functools import partial
from platform import python_version
from statistics import median

import numpy as np

from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.runtime.direct import NATIVE
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import family_named

PROBLEM = Problem.parse("f32 1x1x1 nk bias+relu")
CANDIDATE = Candidate.parse("scalar_f32_1x1 mc1_nc1_kc1 jc_ic_jr_ir")

REPETITIONS = 9
SAMPLE_S = 0.1
SLEEPS = 500

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
    """Time each way with the arrays of each library that is here."""
    kernel = build()
    arrays = {
        "x": np.ones((1, 1), np.float32),
        "bias": np.ones(1, np.float32),
        "out": np.zeros((1, 1), np.float32),
    }
    packed = kernel.pack(np.ones((1, 1), np.float32))
    names = {"kernel": kernel, "packed": packed}
    print(f"{PROBLEM.text}, Python {python_version()}, NumPy {np.__version__}")
    if NATIVE is None:
        print("gemm_tuner.runtime._native is not built: all calls go through ctypes")
    for name, way in WAYS.items():
        print(f"{name:46}{best_ns(way, {**names, **arrays}):8.0f} ns")
    for threads in (1, 2):
        way = f"out= given, threads={threads}, after a sleep of 1 ms"
        call = partial(kernel, arrays["x"], packed, bias=arrays["bias"], out=arrays["out"])
        print(f"{way:46}{median_after_sleep_ns(partial(call, threads=threads)):8.0f} ns")
    try:
        import torch  # noqa: PLC0415 - it is not needed
    except ImportError:
        return
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for name, way in WAYS.items():
        print(f"{name + ', PyTorch':46}{best_ns(way, {**names, **tensors}):8.0f} ns")


def build() -> Kernel:
    """Return the smallest kernel, loaded."""
    family = family_named(CANDIDATE.micro_kernel.family)
    source = render(PROBLEM, CANDIDATE, family)
    built = compile_kernel(source, isa=family.isa, toolchain=find_toolchain())
    return load_kernel(built.binary, artifact=built.artifact, cpu=detect_cpu())


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
