"""Time a layer of floats that is computed in int8: quantising x, the kernel, and both.

    python benchmarks/quantising.py [M N K [BUDGET_S]]

It tunes the kernels, takes the fastest whatever the verdict, and times all in turn on one thread,
so that what disturbs one disturbs the others. It prints the least time of a round and the median,
and how many times as fast as a user's NumPy and the kernel each is, by the least; then how far each
layer is from the product of the floats, beside the greatest result. The sizes are 64 x 256 x 768 by
default. PyTorch takes part if it is installed.
"""

import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from weight_only import fastest_kernel

from gemm_tuner import Problem, quantise_activations, quantise_channels
from gemm_tuner.machine.detect import detect_cpu

Array = NDArray[Any]
Ways = dict[str, Callable[[], Any]]

EPILOGUE = "x_row_zero_point+row_scale+channel_scale+bias"
ROUNDS = 301
ROUND_NS = 1_000_000
SEED = 1


def main(m: int, n: int, k: int, budget_s: float) -> None:
    """Print the times and the errors."""
    random = np.random.default_rng(SEED)
    x = random.standard_normal((m, k), np.float32)
    w, bias = random.standard_normal((n, k), np.float32), random.standard_normal(n, np.float32)
    ways = our_ways(x, w, bias, budget_s)
    if find_spec("torch") is not None:
        ways |= torch_ways(x, w, bias)
    times = race(ways)
    usual = min(times["NumPy and the kernel"])
    print(f"{detect_cpu().brand}, one thread, {m}x{n}x{k}, {ROUNDS} rounds in turn")
    for name, each in times.items():
        print(f"  {name:36} least {min(each):7.1f} us, median {median(each):7.1f} us", end="")
        print(f", {usual / min(each):5.2f} times as fast")
    exact = x.astype(np.float64) @ w.T.astype(np.float64) + bias
    for name, call in ways.items():
        y = call()
        if getattr(y, "shape", None) == exact.shape:
            error = np.abs(np.asarray(y) - exact).max() / np.abs(exact).max()
            print(f"  {name:36} off by {error:.2%} of the greatest result")


def by_numpy(x: Array) -> tuple[Array, dict[str, Array]]:
    """Quantise rows as a user of NumPy does."""
    greatest, least = np.maximum(x.max(axis=1), 0), np.minimum(x.min(axis=1), 0)
    scale = np.maximum((greatest - least) / np.float32(255), np.float32(2.0**-126))
    zero = np.rint(-least / scale)
    elements = np.clip(np.rint(x / scale[:, None]) + zero[:, None], 0, 255).astype(np.uint8)
    return elements, {"row_scale": scale, "x_row_zero_point": zero.astype(np.int32)}


def our_ways(x: Array, w: Array, bias: Array, budget_s: float) -> Ways:
    """Return NumPy, this package and its kernels, tuned first."""
    (m, k), n = x.shape, len(w)
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'quantising.sqlite3'}"
        kernel, plain = (
            fastest_kernel(Problem.parse(f"{types} {m}x{n}x{k} nk {steps}"), budget_s, url)
            for types, steps in (("u8_s8_s32_f32", EPILOGUE), ("f32", "bias"))
        )
    print(f"int8: {kernel.candidate.text}; f32: {plain.candidate.text}")
    channels = quantise_channels(w)
    packed, packed_plain = kernel.pack(channels.w), plain.pack(w)
    q, y = quantise_activations(x), np.empty((m, n), np.float32)
    scales: dict[str, Any] = {"channel_scale": channels.channel_scale, "bias": bias}

    def multiply(elements: Array, operands: dict[str, Any]) -> Array:
        return kernel(elements, packed, out=y, **operands, **scales)

    return {
        "NumPy and the kernel": lambda: multiply(*by_numpy(x)),
        "quantise_activations and the kernel": lambda: multiply(
            quantise_activations(x, out=q).x, q.operands
        ),
        "NumPy alone": lambda: by_numpy(x),
        "quantise_activations alone": lambda: quantise_activations(x, out=q),
        "the kernel alone": lambda: multiply(q.x, q.operands),
        "f32 without quantising": lambda: plain(x, packed_plain, out=y, bias=bias),
    }


def torch_ways(x: Array, w: Array, bias: Array) -> Ways:
    """Return PyTorch's layers: of floats, and the one that quantises x at each call."""
    import torch  # noqa: PLC0415 - an optional dependency

    torch.set_num_threads(1)
    layer = torch.nn.Linear(w.shape[1], w.shape[0])
    layer.weight.data, layer.bias.data = torch.from_numpy(w), torch.from_numpy(bias)
    given = torch.from_numpy(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this interface has a successor, elsewhere
        quantised = torch.ao.quantization.quantize_dynamic(
            torch.nn.Sequential(layer), {torch.nn.Linear}, dtype=torch.qint8
        )

    def without_gradients(model: Any) -> Callable[[], Any]:  # noqa: ANN401 - a module
        call: Callable[[], Any] = torch.no_grad()(lambda: model(given))
        return call

    return {
        f"PyTorch's dynamic int8 ({torch.backends.quantized.engine})": without_gradients(quantised),
        "PyTorch's f32": without_gradients(layer),
    }


def race(ways: Ways) -> dict[str, list[float]]:
    """Return the times of a call of each way, in us, one for each round."""
    calls = {name: calls_of(call) for name, call in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _round in range(ROUNDS):
        for name, call in ways.items():
            begin_ns = time.perf_counter_ns()
            for _call in range(calls[name]):
                call()
            times[name].append((time.perf_counter_ns() - begin_ns) / calls[name] / 1e3)
    return times


def calls_of(call: Callable[[], Any]) -> int:
    """Return how many calls fill a round."""
    call()
    begin_ns = time.perf_counter_ns()
    call()
    return max(1, ROUND_NS // max(1, time.perf_counter_ns() - begin_ns))


if __name__ == "__main__":
    given = sys.argv[1:]
    rows, columns, depth = (int(size) for size in given[:3] or ("64", "256", "768"))
    main(rows, columns, depth, float(given[3]) if len(given) > 3 else 20.0)
