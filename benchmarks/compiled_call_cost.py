"""Print the time of a call of the smallest layer in a compiled model, beyond its kernel.

    python benchmarks/compiled_call_cost.py

A model of 200 layers of 32 by 32, for 4 rows, is compiled by `gemm_tuner.torch.enable` without
guards on modules, as `bench-models` does. The first call tunes the layer, for 4 seconds, in your
own database. The time of a call of the model is divided by its layers, and the least time of the
kernel taken off: what is left is PyTorch's code between two kernels, and the call of the operator.
The least and the median of 300 calls are printed, with Inductor's code in Python and in C++.
"""

import ctypes
import time
from statistics import median
from typing import Any

import torch
from torch.compiler import skip_guard_on_all_nn_modules_unsafe

import gemm_tuner.torch as gt
from gemm_tuner.torch.operators import library

LAYERS, SIZE, ROWS, CALLS = 200, 32, 4, 300


def main() -> None:
    """Time both forms of the code that Inductor writes."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(LAYERS))).eval()
    enabled = gt.enable(tune="wait", budget_s=4)
    for name, is_cpp in (("Python", False), ("C++", True)):
        torch._dynamo.reset()
        options = {
            "cpp_wrapper": is_cpp,
            "guard_filter_fn": skip_guard_on_all_nn_modules_unsafe,
        }
        with torch.no_grad():
            _print_cost(name, torch.compile(model, options=options))
    print(enabled.report[0])


def _print_cost(name: str, compiled: Any) -> None:  # noqa: ANN401 - a module
    x = torch.randn(ROWS, SIZE)
    for _ in range(5):
        compiled(x)
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter_ns()
        compiled(x)
        times.append((time.perf_counter_ns() - begin) / LAYERS)
    kernel = _kernel_ns(compiled, x)
    print(
        f"{name:6}  beyond the kernel: {min(times) - kernel:5.0f} ns least, "
        f"{median(times) - kernel:5.0f} ns in the median; the kernel takes {kernel} ns",
        flush=True,
    )


def _kernel_ns(compiled: Any, x: Any) -> int:  # noqa: ANN401 - a module, a tensor
    times: list[int] = []
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    seen = kind(lambda _layer, _arguments, time_ns: times.append(time_ns))
    native = library()
    native.gemm_tuner_watch(seen, None)
    try:
        compiled(x)
    finally:
        native.gemm_tuner_watch(kind(), None)
    return min(times)


if __name__ == "__main__":
    main()
