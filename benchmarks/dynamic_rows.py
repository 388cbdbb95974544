"""What a compiled layer loses whose number of rows is known when it runs: `1..64` beside each m.

    python benchmarks/dynamic_rows.py --db sqlite:////tmp/rows.sqlite3

It tunes what the database lacks: the range, and each number of rows alone. Then one compiled layer
for all of them and one for each are called in alternation. Above 1, the range takes longer.
"""

import argparse
from collections.abc import Callable
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import torch

import gemm_tuner.torch as gt

ROWS = (1, 3, 8, 16, 33, 64)
RANGE = "1..64"
LAYERS = ((3072, 768), (768, 3072))  # n, k of BERT base
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ROUNDS, CALLS = 31, 10


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--db", required=True, help="database, such as sqlite:////tmp/a.sqlite3")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds to tune a layer")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name, dtype in TYPES.items():
        for n, k in LAYERS:
            layer = torch.nn.Linear(k, n).eval().to(dtype)
            with torch.no_grad():
                losses = list(_losses(layer, dtype, given))
            told = ", ".join(f"{rows}: {loss:.3f}" for rows, loss in losses)
            mean = geometric_mean(loss for _rows, loss in losses)
            print(f"{name} {n}x{k}: {told}; geometric mean {mean:.3f}", flush=True)


def _losses(layer: Any, dtype: Any, given: argparse.Namespace) -> Any:  # noqa: ANN401 - of PyTorch
    inputs = {rows: torch.randn(rows, layer.in_features).to(dtype) for rows in ROWS}
    static = {rows: _compiled(layer, x, given) for rows, x in inputs.items()}
    first = torch.randn(2, layer.in_features).to(dtype)
    torch._dynamo.mark_dynamic(first, 0, min=1, max=64)
    dynamic = _compiled(layer, first, given, dynamic_rows=[RANGE])
    for rows, x in inputs.items():
        ratios = []
        for _ in range(ROUNDS):
            alone, together = _seconds(static[rows], x), _seconds(dynamic, x)
            ratios.append(together / alone)
        yield rows, median(ratios)


def _compiled(layer: Any, x: Any, given: argparse.Namespace, **how: Any) -> Callable[[Any], Any]:  # noqa: ANN401
    enabled = gt.enable(given.db, tune="wait", budget_s=given.budget, **how)
    # What is compiled is kept by code, so each has a code of its own.
    call = eval("lambda x: layer(x)", {"layer": layer})  # noqa: S307 - of this file
    compiled = torch.compile(call, options={"cpp_wrapper": True})
    compiled(x)
    if not enabled.report.taken:
        print(enabled.report, flush=True)
    gt.disable()
    result: Callable[[Any], Any] = compiled
    return result


def _seconds(call: Callable[[Any], Any], x: Any) -> float:  # noqa: ANN401 - a tensor
    call(x)
    begin_s = perf_counter()
    for _ in range(CALLS):
        call(x)
    return perf_counter() - begin_s


if __name__ == "__main__":
    main()
