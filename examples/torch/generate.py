"""Generate text by a language model in turn with tuned kernels and without, and print the times.

    python generate.py --weights int8

It needs transformers and, for weights of integers, torchao. The model has random weights.
"""

import argparse
import copy
from statistics import median
from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gemm_tuner.torch


def count(text: str) -> int:
    """Return a number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def whole_heads(text: str) -> int:
    """Return a width of whole heads, which have 64 elements."""
    number = count(text)
    if number % 64:
        raise argparse.ArgumentTypeError(f"{number} is no multiple of 64")
    return number


def build(layers: int, width: int, weights: str) -> LlamaForCausalLM:
    """Return a model of Llama's kind in bfloat16, with weights of integers if these are wanted."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=-(-11 * width // 512) * 128,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 512),
    )
    model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    if weights == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415

        quantize_(model, Int8WeightOnlyConfig())
    elif weights == "int4":
        from torchao.prototype.quantization.int4 import (  # noqa: PLC0415
            PrototypeInt4WeightOnlyConfig,
        )
        from torchao.quantization import quantize_  # noqa: PLC0415

        group = 128 if width % 128 == 0 else 64
        quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=group))
    return model


def times_of(model: LlamaForCausalLM, prompt: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Return the seconds to read a prompt, and for each token after it."""
    taken = []
    for new in (1, 1 + tokens):
        begin = perf_counter()
        with torch.no_grad():
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        taken.append(perf_counter() - begin)
    return taken[0], (taken[1] - taken[0]) / tokens  # below 0 if the machine was disturbed


def main() -> None:
    """Tune the layers of a model, then let it generate beside a copy without kernels."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--weights", choices=("bf16", "int8", "int4"), default="bf16")
    parser.add_argument("--layers", type=count, default=8)
    parser.add_argument("--width", type=whole_heads, default=2048, help="a multiple of 64")
    parser.add_argument("--prompt", type=count, default=64, help="tokens")
    parser.add_argument("--tokens", type=count, default=32, help="that are generated")
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--tune", choices=("wait", "never"), default="wait")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds to tune a layer")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model = build(args.layers, args.width, args.weights)
    tuned = copy.deepcopy(model)
    # One row for each step, and the prompt. For prompts of any length, write [1, "2..512"]: a
    # range takes some minutes a layer to tune.
    report = gemm_tuner.torch.replace(
        tuned, rows=[1, args.prompt], tune=args.tune, budget_s=args.budget
    )
    print(report.summary)
    prompt = torch.randint(model.config.vocab_size, (1, args.prompt))
    for one in (model, tuned):
        times_of(one, prompt, 1)
    rounds = []
    for number in range(args.rounds):
        pair = (model, tuned) if number % 2 else (tuned, model)
        found = {one is tuned: times_of(one, prompt, args.tokens) for one in pair}
        rounds.append((found[False], found[True]))
    for place, what in enumerate((f"prompt of {args.prompt} tokens", "token")):
        before, after = ([one[which][place] for one in rounds] for which in (0, 1))
        ratio = median(one / other for one, other in zip(before, after, strict=True))
        print(
            f"{what}: {1e3 * median(before):.1f} ms, with kernels {1e3 * median(after):.1f} ms, "
            f"{ratio:.2f} times the speed"
        )


if __name__ == "__main__":
    main()
