"""Time experts of a language model in eager mode, with kernels and without, in turn.

    python benchmarks/experts.py --dtype bf16 --threads 2 --tokens 1 64

One layer of experts of the sizes of a model, by `transformers`, with random weights. Each token
has its experts at random, other ones at each call, so that weights come from memory. `replace` sees
a call of each number of tokens, and tunes what the local store lacks within `--budget` for each
number of rows. A round calls the layer without kernels (`torch.nn.functional.grouped_mm`), and then
with them, each of the two first in every other round. The table has medians over the rounds, how
many GB/s of weights were read, and the ratio of each round's two times: its median, and where half
of the rounds lie. Be alone on the machine.
"""

import argparse
import copy
import time
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import gemm_tuner.torch

TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a layer of experts: how many there are, how many compute a token, and their sizes."""

    experts: int
    of_token: int
    hidden: int
    within: int


MODELS = {  # as their configurations say; of the experts, no more than fit into memory
    "qwen3-30b-a3b": Sizes(experts=64, of_token=8, hidden=2048, within=768),
    "mixtral-8x7b": Sizes(experts=8, of_token=2, hidden=4096, within=14336),
}


def layer_of(sizes: Sizes, dtype: torch.dtype) -> Any:  # noqa: ANN401 - a module
    """Return a layer of experts with random weights."""
    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.within,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.of_token,
    )
    config._experts_implementation = "grouped_mm"
    layer = Qwen3MoeExperts(config).eval().to(dtype)
    for weights in layer.parameters():
        torch.nn.init.normal_(weights, std=0.02)
    return layer


def call_of(sizes: Sizes, tokens: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Return tokens, the experts of each, and the weights of these in the sum."""
    chosen = [torch.randperm(sizes.experts)[: sizes.of_token] for _ in range(tokens)]
    share = torch.rand(tokens, sizes.of_token).softmax(-1).to(dtype)
    return torch.randn(tokens, sizes.hidden).to(dtype), torch.stack(chosen), share


def seconds(layer: Any, call: tuple[Any, Any, Any]) -> float:  # noqa: ANN401 - a module
    """Return how long a call takes."""
    begin = time.perf_counter()
    layer(*call)
    return time.perf_counter() - begin


def weight_bytes(sizes: Sizes, call: tuple[Any, Any, Any]) -> int:
    """Return the bytes of the weights of all experts that a call has."""
    hit = len(call[1].unique())
    return hit * 3 * sizes.hidden * sizes.within * call[0].element_size()


def main(asked: argparse.Namespace) -> None:
    """Tune, time, and print a row for each number of tokens."""
    torch.manual_seed(0)
    torch.set_num_threads(asked.threads)
    sizes, dtype = MODELS[asked.model], TYPES[asked.dtype]
    plain = layer_of(sizes, dtype)
    with torch.no_grad():
        tuned = copy.copy(plain)  # of the same weights
        examples = [call_of(sizes, tokens, dtype) for tokens in asked.tokens]
        report = gemm_tuner.torch.replace(tuned, examples, tune="wait", budget_s=asked.budget)
        print(report, flush=True)
        print("| Tokens | PyTorch | with kernels | GB/s | Ratio | Half of the rounds |")
        print("|---|---|---|---|---|---|")
        for tokens in asked.tokens:
            row(plain, tuned, [call_of(sizes, tokens, dtype) for _ in range(asked.rounds)], sizes)


def row(plain: Any, tuned: Any, calls: list[tuple[Any, Any, Any]], sizes: Sizes) -> None:  # noqa: ANN401
    """Time the calls, and print what they took."""
    expected, y = plain(*calls[0]).float(), tuned(*calls[0]).float()
    error = float((y - expected).norm() / expected.norm())
    if not error < 1e-2:
        raise SystemExit(f"the result is off by {error:.1e} of its norm.")
    times = []
    for turn, call in enumerate(calls):
        # Whoever comes second finds some weights in the last cache.
        order = (plain, tuned) if turn % 2 else (tuned, plain)
        took = {id(layer): seconds(layer, call) for layer in order}
        times.append((took[id(plain)], took[id(tuned)]))
    ratios = [before / after for before, after in times]
    low, _middle, high = quantiles(ratios, n=4)
    before_s, after_s = (median(of_one) for of_one in zip(*times, strict=True))
    rate = median(
        weight_bytes(sizes, call) / after for call, (_, after) in zip(calls, times, strict=True)
    )
    print(
        f"| {len(calls[0][0])} | {before_s * 1e3:.2f} ms | {after_s * 1e3:.2f} ms | "
        f"{rate / 1e9:.1f} | {median(ratios):.2f} | {low:.2f} to {high:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-30b-a3b")
    parser.add_argument("--dtype", choices=list(TYPES), default="bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--budget", type=float, default=8.0, help="seconds for a number of rows")
    parser.add_argument("--rounds", type=int, default=25)
    main(parser.parse_args())
