"""Time attention of many heads in one call, beside what users call instead.

    python benchmarks/attention_heads.py --dtype bf16 --threads 2

    python benchmarks/attention_heads.py --tokens 128 197 --heads 12 --json heads.json

    python benchmarks/attention_heads.py --queries 1 --tokens 4096 32768 --heads 32 --sharing 4

For each number of tokens, size and number of heads, with and without causal, a kernel is looked up
in the local store, or tuned there for one head and one thread within `--budget`. Then it is called
with all heads at once, as PyTorch's operator, in turn with `scaled_dot_product_attention` of
PyTorch (its flash kernel and its two products), `zentorch_sdpa` and, in f32, OpenVINO, those that
are installed. Each works in a process of its own with so many threads. A round calls each for some
milliseconds, one after the other; the table has medians over the rounds, and the ratio to the
fastest of the others. With `--queries`, so many rows of queries stand beside a cache of `--tokens`
keys and values; a loop that does no more than read the same arrays has a turn too, and the last
column is its time over that of the kernel. The results are compared with PyTorch's in float64, of
one head. What the verdict says of one head is told on the side: where it is `baseline`, PyTorch's
own is what is timed. Be alone on the machine.
"""

import argparse
import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
import torch

import gemm_tuner
from gemm_tuner.bench.baselines.openvino import CpuPlugin
from gemm_tuner.bench.baselines.zentorch import import_zentorch
from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct, build_driver, widest_vectors
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.torch.operators import add_layer

Call = Callable[[], Any]  # the result is an array or a tensor

OURS = "gemm-tuner"
READING = "reading"  # of keys and values, and no more
READS = 16  # in a call, beside which the start of threads takes no time
F32_ALONE = "openvino"  # its bf16 rounds floats in the call
LEAST_ROUND_S = 0.02
LONGEST_S = 4.0  # of all rounds of one row, about
FAR_SLOWER = 3  # a library that takes so many times as long as another is left out of rounds
FIRST_ROUNDS = 3
LONG_CALL_S = 1.0  # one round is enough to see who is far slower
ROUNDS = 11
LEAST_ROUNDS = 5
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The attention that is called, and on how many threads."""

    dtype: str
    tokens: int
    head: int
    heads: int
    is_causal: bool
    threads: int
    queries: int
    sharing: int  # heads of queries, of the same keys and values

    @property
    def problem(self) -> str:
        """Return the problem of one head."""
        steps = "scale+causal" if self.is_causal else "scale"
        rows = self.sharing if self.queries == 1 else self.queries
        return f"attention {self.dtype} {rows}x{self.tokens}x{self.head} {steps}"

    @property
    def scale(self) -> float:
        """Return what scores are multiplied by."""
        return 1 / math.sqrt(self.head)


def make_inputs(row: Row) -> list[torch.Tensor]:
    """Return q (1, heads, queries, head), k and v (1, heads, tokens, head), alike everywhere."""
    torch.set_num_threads(row.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(SEED)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[row.dtype]
    shared = row.heads // row.sharing, row.tokens
    sizes = (row.heads, row.queries), shared, shared
    return [torch.randn(1, *size, row.head).to(kind) for size in sizes]


@cache
def inputs_of(row: Row) -> list[torch.Tensor]:
    """Return the same tensors again: which pages they lie on decides how fast they are read."""
    return make_inputs(row)


def our_call(row: Row, budget: str) -> Call:
    """Return a call of the operator with the tuned kernel, or of PyTorch's own where none wins."""
    tuned = gemm_tuner.tune(row.problem, budget_s=float(budget), is_quiet=True)
    print(f"{row.problem}: {tuned.verdict.decision.value}", file=sys.stderr)
    if not isinstance(tuned.kernel, Kernel):
        return flash_call(row, budget)
    layer = add_layer([tuned.kernel])
    attend = torch.ops.gemm_tuner.attention
    return partial(attend, *inputs_of(row), layer.number, None, row.scale)


def flash_call(row: Row, _budget: str) -> Call:
    """Return a call of PyTorch's function, which takes its flash kernel on a CPU."""
    attend = torch.nn.functional.scaled_dot_product_attention
    how = {"is_causal": row.is_causal, "scale": row.scale, "enable_gqa": row.sharing > 1}
    return partial(attend, *make_inputs(row), **how)


def products_call(row: Row, _budget: str) -> Call:
    """Return a call of PyTorch's operator of two products and a softmax."""
    multiply = torch.ops.aten._scaled_dot_product_attention_math
    q, k, v = make_inputs(row)
    how = {"scale": row.scale, "enable_gqa": row.sharing > 1}
    return lambda: multiply(q, k, v, None, 0.0, row.is_causal, None, **how)[0]


def zentorch_call(row: Row, _budget: str) -> Call:
    """Return a call of zentorch's operator."""
    import_zentorch(row.threads)
    q, k, v = make_inputs(row)
    attend = torch.ops.zentorch.zentorch_sdpa
    return lambda: attend(q, k, v, 0.0, row.is_causal, attn_mask=None, scale=row.scale)[0]


@cache
def _plugin() -> CpuPlugin:
    """Return the only plugin of the process, which ends badly if it is freed between models."""
    return CpuPlugin()


def openvino_call(row: Row, _budget: str) -> Call:
    """Return a call of a compiled model whose arrays are bound to its tensors."""
    openvino, operators = import_module("openvino"), import_module("openvino.opset13")
    q, k, v = (one.numpy() for one in make_inputs(row))
    arrays, y = {"q": q, "k": k, "v": v}, np.empty_like(q)
    nodes = [operators.parameter(one.shape, np.float32, name=name) for name, one in arrays.items()]
    for name, node in zip(arrays, nodes, strict=True):
        node.output(0).get_tensor().set_names({name})
    attended = operators.scaled_dot_product_attention(
        *nodes,
        operators.constant(np.float32(0)),
        operators.constant(np.float32(row.scale)),
        causal=row.is_causal,
    )
    model = openvino.Model([attended], nodes)
    call = _plugin().compiled(model, arrays, y, threads=row.threads, text=row.problem)

    def run() -> object:
        call()
        return y

    return run


def reading_call(row: Row, _budget: str) -> Call:
    """Return a call that reads keys and values `READS` times, each thread its share."""
    cpu = detect_cpu()
    driver = build_driver("roofline", find_toolchain(), "sample.h", isa=widest_vectors(cpu.isa))
    read, (_q, *matrices) = ctypes.CDLL(str(driver)).roofline_read, inputs_of(row)
    share = ctypes.c_int64(matrices[0].nbytes // row.threads)
    shares = []
    for thread in range(row.threads):
        k, v = (ctypes.c_void_p(one.data_ptr() + thread * share.value) for one in matrices)
        shares.append((WeightsStruct(copies=ctypes.pointer(k), count=1, next=0), v, SampleStruct()))

    def read_share(weights: WeightsStruct, v: ctypes.c_void_p, sample: SampleStruct) -> None:
        read(ctypes.byref(weights), share, v, share, ctypes.c_int64(READS), ctypes.byref(sample))

    threads = ThreadPoolExecutor(max(1, row.threads - 1))

    def run() -> object:
        others = [threads.submit(read_share, *one) for one in shares[1:]]
        read_share(*shares[0])
        for other in others:
            other.result()
        return matrices  # which keeps them alive

    return run


CALLS = {
    OURS: our_call,
    "torch flash": flash_call,
    "torch math": products_call,
    "zentorch": zentorch_call,
    F32_ALONE: openvino_call,
}
OTHERS = [name for name in CALLS if name != OURS]


def error_of(row: Row, result: object) -> float:
    """Return the greatest error of the last head, relative to the greatest value."""
    q, k, v = (one[:, -1:].double() for one in make_inputs(row))
    attend = torch.nn.functional.scaled_dot_product_attention
    right = attend(q, k, v, is_causal=row.is_causal, scale=row.scale)
    last = torch.as_tensor(result)[:, -1:].double()
    return float((last - right).abs().max() / right.abs().max())


def serve(name: str, budget: str, messages: Connection) -> None:
    """Time calls of one library, a row and a round at a time, until there are no more rows."""
    call: Call | None = None
    reading: Call | None = None
    while True:
        message = messages.recv()
        if isinstance(message, Row):
            call = reading = None  # frees the arrays of the row before
            inputs_of.cache_clear()
            try:
                row, call = message, CALLS[name](message, budget)
                messages.send(error_of(message, call()))
            except Exception as error:  # noqa: BLE001 - whatever a library says is reported
                messages.send(f"{type(error).__name__}: {error}"[:200])
            continue
        assert call is not None
        if message == READING:
            reading = reading or reading_call(row, budget)
        timed, reads = (reading, READS) if message == READING and reading else (call, 1)
        calls, begin = 0, time.perf_counter()
        while calls == 0 or time.perf_counter() - begin < LEAST_ROUND_S:
            timed()
            calls += 1
        messages.send((time.perf_counter() - begin) / calls / reads)


@dataclass(slots=True)
class Library:
    """A process that times one library."""

    name: str
    messages: Connection
    process: BaseProcess

    def prepare(self, row: Row) -> float | str:
        """Return the error of the result of a row, or why there is none."""
        self.messages.send(row)
        answer: float | str = self.messages.recv()
        return answer

    def time(self) -> float:
        """Return what a call takes in a round, in seconds."""
        self.messages.send(self.name)
        seconds: float = self.messages.recv()
        return seconds


def start(names: list[str], budget: str) -> list[Library]:
    """Return a process for each library."""
    context = get_context("spawn")
    libraries = []
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(name, budget, theirs), daemon=True)
        process.start()
        theirs.close()
        libraries.append(Library(name, ours, process))
    return libraries


def measure(row: Row, libraries: list[Library]) -> dict[str, Any]:
    """Return the times of a row in seconds, the errors, and what libraries refused."""
    errors = {one.name: one.prepare(row) for one in libraries}
    able = [one for one in libraries if isinstance(errors[one.name], float)]
    first = {one.name: one.time() for one in able}
    for _round in range(FIRST_ROUNDS - 1):
        for one in able:
            if first[one.name] < LONG_CALL_S:
                first[one.name] = min(first[one.name], one.time())
    far = FAR_SLOWER * min(taken for name, taken in first.items() if name in OTHERS)
    able = [one for one in able if one.name == OURS or first[one.name] <= far]
    if row.queries < row.tokens:  # by the process, and in the memory, of our kernel
        ours = next(one for one in able if one.name == OURS)
        able.append(Library(READING, ours.messages, ours.process))
        first[READING] = able[-1].time()
    rounds = int(LONGEST_S / (len(able) * LEAST_ROUND_S + sum(first[one.name] for one in able)))
    times: dict[str, list[float]] = {one.name: [] for one in able}
    for _round in range(min(ROUNDS, max(LEAST_ROUNDS, rounds))):
        for one in able:
            times[one.name].append(one.time())
    return {
        **asdict(row),
        "seconds": {name: median(taken) for name, taken in times.items()},
        "errors": errors,
    }


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the grid."""
    for tokens in args.tokens:
        for head in args.sizes:
            for heads in args.heads:
                for is_causal in (False,) if args.queries else (False, True):
                    yield Row(
                        dtype=args.dtype,
                        tokens=tokens,
                        head=head,
                        heads=heads,
                        is_causal=is_causal,
                        threads=args.threads,
                        queries=args.queries or tokens,
                        sharing=args.sharing,
                    )


def main() -> None:
    """Print a row of a table for each row of the grid, and the mean."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 197, 512, 2048, 8192])
    parser.add_argument("--queries", type=int, help="rows beside a cache, instead of --tokens")
    parser.add_argument("--sharing", type=int, default=1, help="heads of queries of one of keys")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--heads", type=int, nargs="+", default=[12, 32])
    parser.add_argument("--beside", nargs="+", default=OTHERS, choices=OTHERS)
    parser.add_argument("--budget", default="8", help="seconds to tune a head that is not stored")
    parser.add_argument("--json", type=Path, help="write all times there")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    others = (
        args.beside if args.dtype == "f32" else [one for one in args.beside if one != F32_ALONE]
    )
    names = [OURS, *others]
    libraries = start(names, args.budget)
    found, ratios = [], []
    print(
        "| tokens | head | heads | causal | gemm-tuner | a head | fastest other | ratio | reads |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows_of(args):
        result = measure(row, libraries)
        found.append(result)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
        taken = dict(result["seconds"])
        for name, error in result["errors"].items():
            if isinstance(error, str):
                print(f"{row.problem}: {name}: {error}", file=sys.stderr)
        ours, reading = taken.pop(OURS), taken.pop(READING, None)
        other = min(taken, key=taken.__getitem__)
        ratios.append(taken[other] / ours)
        size = f"{row.tokens} | {row.head} | {row.heads} | {'causal' if row.is_causal else ''}"
        time_of_head = f"{ours * 1e6:.1f} µs | {ours / row.heads * 1e6:.2f}"
        fastest = f"{other} {taken[other] * 1e6:.1f}"
        share = f"{reading / ours:.0%}" if reading else ""
        print(f"| {size} | {time_of_head} | {fastest} | {ratios[-1]:.3f} | {share} |", flush=True)
    for one in libraries:
        one.process.kill()
    print(f"\nGeometric mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}.")


if __name__ == "__main__":
    main()
