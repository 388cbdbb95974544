"""Time whole models of PyTorch, plain and with tuned kernels, in alternation.

    python benchmarks/torch_models.py bert vit --dtype f32 --threads 1 --rounds 15

Each way to run a model has a process of its own, and is at its best: frozen weights, warm. Rounds
go from one process to the next, so that what disturbs the machine disturbs all. The layers of a
model are tuned first, into a database that a second run finds again. Weights are random.

It needs `pip install transformers`; the ways `zentorch` and `openvino` need the packages of these
names. zentorch is its backend of torch.compile with frozen weights. OpenVINO gets the model by
`convert_model`, and the precision of `--dtype` as a hint.
"""

# ruff: noqa: ANN401 - PyTorch and transformers are not known to the type checker

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    MobileBertConfig,
    MobileBertModel,
    ViTConfig,
    ViTModel,
)

import gemm_tuner.torch
from gemm_tuner.store.database import open_database

OURS = ("replace", "tune_model", "enable")
WAYS = ("eager", "compile", "max-autotune", "zentorch", "openvino", *OURS)
TOKENS = 128


def _bert() -> tuple[Any, dict[str, Any]]:
    return BertModel(BertConfig()), {"input_ids": torch.randint(0, 30000, (1, TOKENS))}


def _mobilebert() -> tuple[Any, dict[str, Any]]:
    config = MobileBertConfig(num_hidden_layers=8)
    return MobileBertModel(config), {"input_ids": torch.randint(0, 30000, (1, TOKENS))}


def _vit() -> tuple[Any, dict[str, Any]]:
    return ViTModel(ViTConfig(num_hidden_layers=4)), {"pixel_values": torch.randn(1, 3, 224, 224)}


def _mlp() -> tuple[Any, dict[str, Any]]:
    """The two multilayer perceptrons of DLRM, of MLPerf's sizes, one after the other."""
    sizes = [13, 512, 256, 128], [479, 1024, 1024, 512, 256, 1]

    class Towers(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.bottom, self.top = (self._tower(one) for one in sizes)

        def _tower(self, widths: list[int]) -> Any:
            layers: list[Any] = []
            for k, n in pairwise(widths):
                layers += [torch.nn.Linear(k, n), torch.nn.ReLU()]
            return torch.nn.Sequential(*layers)

        def forward(self, dense: Any, features: Any) -> Any:
            return self.bottom(dense), self.top(features)

    return Towers(), {"dense": torch.randn(128, 13), "features": torch.randn(128, 479)}


def _mixer() -> tuple[Any, dict[str, Any]]:
    """Four blocks of MLP-Mixer B/16: 196 tokens of 768, mixed through 384 and 3072."""
    tokens, channels = 196, 768

    class Block(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(channels) for _ in range(2))
            self.of_tokens, self.of_channels = self._mlp(tokens, 384), self._mlp(channels, 3072)

        def _mlp(self, k: int, n: int) -> Any:
            layers = torch.nn.Linear(k, n), torch.nn.GELU(), torch.nn.Linear(n, k)
            return torch.nn.Sequential(*layers)

        def forward(self, x: Any) -> Any:
            x = x + self.of_tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            return x + self.of_channels(self.norms[1](x))

    class Mixer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x: Any) -> Any:
            return (self.blocks(x),)

    return Mixer(), {"x": torch.randn(1, tokens, channels)}


def _llama() -> tuple[Any, dict[str, Any]]:
    """One token through two layers of the sizes of a Llama with 7e9 weights."""
    config = LlamaConfig(num_hidden_layers=2, vocab_size=1000, use_cache=False)
    inputs = {"input_ids": torch.randint(0, 1000, (1, 1))}
    # Without a mask, it looks for sequences that were packed, which OpenVINO cannot convert.
    return LlamaModel(config), {**inputs, "attention_mask": torch.ones(1, 1, dtype=torch.int64)}


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "bert": _bert,
    "vit": _vit,
    "mobilebert": _mobilebert,
    "dlrm": _mlp,
    "mixer": _mixer,
    "llama": _llama,
}


def prepare(
    way: str, model_name: str, *, dtype: str, threads: int, db: str, budget_s: float
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a call of the model in one way, warm; kernels are tuned if there is a budget."""
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model, inputs = MODELS[model_name]()
    model.eval()
    if way == "openvino":
        return _openvino(model, inputs, dtype=dtype, threads=threads)
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
        inputs = {
            name: one.to(torch.bfloat16) if one.is_floating_point() else one
            for name, one in inputs.items()
        }
    expected = _first(model(**inputs)).float()
    report = None
    tune = "wait" if budget_s else "never"
    if way == "replace":
        report = gemm_tuner.torch.replace(
            model, inputs, source=db, tune=tune, budget_s=budget_s or 1
        )
    if way == "tune_model":
        gain = gemm_tuner.torch.tune_model(model, inputs, source=db, budget_s=0)
        print(gain, file=sys.stderr)
    enabled = (
        gemm_tuner.torch.enable(db, tune=tune, budget_s=budget_s or 1) if way == "enable" else None
    )
    torch._inductor.config.freezing = way != "eager"
    call = model
    if way in ("compile", "enable"):
        call = torch.compile(model)
    if way == "max-autotune":
        call = torch.compile(model, mode="max-autotune-no-cudagraphs")
    if way == "zentorch":
        import zentorch  # noqa: F401, PLC0415 - it is a backend from now on

        call = torch.compile(model, backend="zentorch")
    for _ in range(3):
        y = _first(call(**inputs)).float()
    report = enabled.report if enabled else report
    facts = {
        "difference": float((y - expected).abs().max() / expected.abs().max()),
        "taken": f"{len(report.taken)} of {len(report)}" if report is not None else "",
    }
    return lambda: call(**inputs), facts


def _openvino(
    model: Any, inputs: dict[str, Any], *, dtype: str, threads: int
) -> tuple[Callable[[], Any], dict[str, Any]]:
    import openvino  # noqa: PLC0415 - of this way alone

    expected = _first(model(**inputs)).float()
    options = {
        "INFERENCE_PRECISION_HINT": dtype,
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    converted = openvino.convert_model(model, example_input=inputs)
    request = openvino.compile_model(converted, "CPU", options).create_infer_request()
    request.infer({name: one.numpy() for name, one in inputs.items()})
    y = torch.from_numpy(request.get_output_tensor(0).data.astype("float32"))
    difference = float((y - expected).abs().max() / expected.abs().max())
    return request.infer, {"difference": difference, "taken": ""}


def _first(output: Any) -> Any:
    return output[0]


def serve(arguments: argparse.Namespace) -> None:
    """Prepare one way, then time a round of calls for each line on stdin."""
    call, facts = prepare(
        arguments.way,
        arguments.models[0],
        dtype=arguments.dtype,
        threads=arguments.threads,
        db=arguments.db,
        budget_s=arguments.budget if arguments.tunes else 0.0,
    )
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        samples = []
        for _ in range(int(line)):
            begin_s = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begin_s)
        print(json.dumps(statistics.median(samples)), flush=True)


def start(arguments: argparse.Namespace, model: str, way: str, *, tunes: bool) -> Any:
    command = [
        *(sys.executable, __file__, model, "--way", way, "--dtype", arguments.dtype),
        *("--threads", str(arguments.threads), "--db", arguments.db),
        *("--budget", str(arguments.budget), *(["--tunes"] if tunes else [])),
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    answer = process.stdout.readline()
    if not answer:
        print(f"{model}: {way} did not start, and is left out", file=sys.stderr, flush=True)
        return None
    return process, json.loads(answer)


def compare(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    for way in (one for one in arguments.ways if one in ("replace", "enable") and arguments.budget):
        print(f"{model}: tuning for {way}", file=sys.stderr, flush=True)
        tuning = start(arguments, model, way, tunes=True)
        if tuning is not None:
            tuning[0].stdin.close()
            tuning[0].wait()
    begun = {way: start(arguments, model, way, tunes=False) for way in arguments.ways}
    ways = {way: one for way, one in begun.items() if one is not None}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for place in range(arguments.rounds):
        for way, (process, _facts) in ways.items():
            process.stdin.write(f"{arguments.calls}\n")
            times[way].append(json.loads(process.stdout.readline()))
        print(f"{model}: round {place + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    for process, _facts in ways.values():
        process.stdin.close()
        process.wait()
    medians = {way: statistics.median(of_way) for way, of_way in times.items()}
    print(f"\n{model} {arguments.dtype}, {arguments.threads} threads")
    for way, median in medians.items():
        facts = ways[way][1]
        ratios = "  ".join(
            f"{statistics.median(a / b for a, b in zip(times[rival], times[way], strict=True)):.3f}"
            f" over {rival}"
            for rival in medians
            if rival not in OURS and rival != way
        )
        taken = f"  taken {facts['taken']}" if facts["taken"] else ""
        print(
            f"  {way:13} {median * 1e3:9.3f} ms  {ratios}{taken}  error {facts['difference']:.1e}"
        )
    return {"model": model, "dtype": arguments.dtype, "threads": arguments.threads, "s": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=3, help="of each way in a round")
    parser.add_argument(
        "--budget", type=float, default=8.0, help="seconds to tune a layer; 0: none"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--db", default=f"sqlite:///{Path('torch-models.sqlite3').resolve()}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--tunes", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        serve(arguments)
        return
    _make_database(arguments.db)
    results = [compare(arguments, model) for model in arguments.models]
    if arguments.json:
        arguments.json.write_text(json.dumps(results))


def _make_database(url: str) -> None:
    open_database(url).dispose()


if __name__ == "__main__":
    main()
