"""What compiled layers lose whose number of rows is known when they run: `1..64` beside each m.

    python benchmarks/dynamic_rows.py --db sqlite:////tmp/rows.sqlite3

The layers are those of the blocks of BERT base, twelve times, so that their weights leave the
caches between calls. It tunes what the database lacks: the range, and each number of rows alone.
Then the layers compiled for all rows, and those for each, are called in alternation. Above 1, the
range takes longer. PyTorch compiles one row for itself, once, where it comes. Each is compiled
twice, and the faster of the two counts: where packed weights come to lie makes 4 % for few rows.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import torch

import gemm_tuner.torch as gt
from gemm_tuner.errors import GemmTunerError

ROWS = (1, 3, 8, 16, 33, 64)
RANGE = "1..64"
N, K, BLOCKS = 3072, 768, 12  # of BERT base
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ROUNDS, COPIES = 31, 2


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db", required=True, help="database, such as sqlite:////tmp/a.sqlite3")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds to tune each m")
    parser.add_argument("--threads", type=int, choices=range(1, 257), metavar="N", default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name, dtype in TYPES.items():
        layers = [torch.nn.Linear(*sizes) for _ in range(BLOCKS) for sizes in ((K, N), (N, K))]
        model = torch.nn.Sequential(*layers).eval().to(dtype)
        with torch.no_grad():
            losses = list(_losses(model, dtype, given))
        told = ", ".join(f"{rows}: {loss:.3f}" for rows, loss in losses)
        mean = geometric_mean(loss for _rows, loss in losses)
        print(f"{name}: {told}; geometric mean {mean:.3f}", flush=True)


def _losses(model: Any, dtype: Any, given: argparse.Namespace) -> Any:  # noqa: ANN401 - of PyTorch
    for rows in ROWS:
        x = torch.randn(rows, K).to(dtype)
        first = torch.randn(max(2, rows), K).to(dtype)
        torch._dynamo.mark_dynamic(first, 0, min=1, max=64)
        alone, together = [], []
        for _ in range(COPIES):
            alone.append(_compiled(model, [x], given))
            together.append(_compiled(model, [first, x], given, dynamic_rows=[RANGE]))
        seconds: dict[Any, list[float]] = {call: [] for call in (*alone, *together)}
        for _ in range(ROUNDS):
            for call, times in seconds.items():
                times.append(_seconds(call, x))
        fastest = [min(median(seconds[call]) for call in calls) for calls in (together, alone)]
        yield rows, fastest[0] / fastest[1]
        torch._dynamo.reset()
        gc.collect()


def _compiled(
    model: Any,  # noqa: ANN401 - of PyTorch
    inputs: Sequence[Any],
    given: argparse.Namespace,
    **how: Any,  # noqa: ANN401
) -> Callable[[Any], Any]:
    enabled = gt.enable(given.db, tune="wait", budget_s=given.budget, **how)
    # What is compiled is kept by code, so each has a code of its own.
    call = eval("lambda x: model(x)", {"model": model})  # noqa: S307 - of this file
    compiled = torch.compile(call, options={"cpp_wrapper": True})
    for x in inputs:
        compiled(x)
    if enabled.report.left:
        print(enabled.report, flush=True)
    gt.disable()
    result: Callable[[Any], Any] = compiled
    return result


def _seconds(call: Callable[[Any], Any], x: Any) -> float:  # noqa: ANN401 - a tensor
    call(x)
    begin_s = perf_counter()
    call(x)
    return perf_counter() - begin_s


if __name__ == "__main__":
    try:
        main()
    except GemmTunerError as error:
        sys.exit(f"Error: {error}")
