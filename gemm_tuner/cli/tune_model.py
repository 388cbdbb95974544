"""`gemm-tuner tune-model`: tune the models of a script, and print what they gain."""

from typing import TYPE_CHECKING, Any

import typer

from gemm_tuner.cli import options
from gemm_tuner.cli.output import (
    duration_text,
    print_json,
    print_line,
    print_message,
    print_table,
    time_text,
)
from gemm_tuner.cli.script import Arguments, Script, check_script, run_script
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.store.database import default_database_url, open_database

if TYPE_CHECKING:
    from gemm_tuner.torch.calls import CalledModel
    from gemm_tuner.torch.tuning import LayerGain, ModelGain

_BUDGET = "10m"


def tune_model(
    script: Script,
    arguments: Arguments = None,
    *,
    budget: options.ModelBudget = _BUDGET,
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Tune the models that a script runs, and print what they gain by it.

    The script runs once; then its models are called as it called them, without gradients. The time
    goes to their linear layers by their shares of the time of the model.
    """
    check_script(script, "tune-model")
    budget_s = options.parse_duration_s(budget)
    url = db or default_database_url()
    open_database(url).dispose()
    from gemm_tuner.torch.calls import Capturing  # noqa: PLC0415 - loads PyTorch
    from gemm_tuner.torch.operators import library  # noqa: PLC0415

    library()
    with Capturing() as capturing:
        code = run_script(script, arguments or [])
    models = [one for one in capturing.models.values() if _has_layers(one)]
    for one in models:
        if one.left_out:
            print_message(
                f"{type(one.module).__name__}: {one.left_out} calls are left out, because their "
                "arguments cannot be copied."
            )
    models = [one for one in models if one.calls]
    if not models:
        raise InvalidSetting(
            f"no model with linear layers was called in {str(script)!r}; what other threads and "
            "processes call is not seen, nor what is compiled."
        )
    gains = [_tune(one, url, budget_s / len(models)) for one in models]
    if as_json:
        print_json({"models": [_facts(*one) for one in zip(models, gains, strict=True)]})
    else:
        for one, gain in zip(models, gains, strict=True):
            _print(one, gain)
    if code:
        raise typer.Exit(code)


def _has_layers(model: "CalledModel") -> bool:
    from torch import nn  # noqa: PLC0415 - takes a second

    return any(isinstance(one, nn.Linear) for one in model.module.modules())


def _tune(model: "CalledModel", url: str, budget_s: float) -> "ModelGain":
    from gemm_tuner.torch.tuning import tune_calls  # noqa: PLC0415 - loads PyTorch

    name = type(model.module).__name__

    def tell(step: str, left_s: float) -> None:
        left = f", at most {duration_text(left_s)} left" if left_s else ""
        print_message(f"{name}: {step}{left}")

    calls = list(model.calls.values())
    return tune_calls(model.module, calls, source=url, budget_s=budget_s, on_step=tell)


def _facts(model: "CalledModel", gain: "ModelGain") -> dict[str, Any]:
    return {
        "model": type(model.module).__name__,
        "calls": sum(one.count for one in model.calls.values()),
        "plain_s": gain.plain_s,
        "tuned_s": gain.tuned_s,
        "speedup": gain.speedup,
        "layers": [
            {
                "names": list(one.names),
                "problem": one.problem,
                "share": one.share,
                "plain_s": one.plain_s,
                "tuned_s": one.tuned_s,
                "is_taken": one.is_taken,
                "reason": one.reason,
            }
            for one in gain.layers
        ],
    }


def _print(model: "CalledModel", gain: "ModelGain") -> None:
    name = type(model.module).__name__
    calls = sum(one.count for one in model.calls.values())
    print_table(
        f"{name}, {calls} calls: times of all calls, in eager mode",
        (">share", "layers", "problem", ">PyTorch", ">kernel", ">speed", "", "why"),
        [_row(one) for one in gain.layers],
    )
    taken = sum(len(one.names) for one in gain.layers if one.is_taken)
    print_line(
        f"{name}: {time_text(gain.plain_s * 1e9)} before, {time_text(gain.tuned_s * 1e9)} now: "
        f"{gain.speedup:.3f} times as fast, by the kernels of {taken} layers."
    )
    if taken:
        print_line(
            "To use them: gemm_tuner.torch.tune_model(model, inputs, budget_s=0), which times them "
            "again, or gemm_tuner.torch.replace(model, inputs)."
        )


def _row(one: "LayerGain") -> tuple[str, ...]:
    more = f" and {len(one.names) - 1} more" if len(one.names) > 1 else ""
    return (
        f"{one.share:.1%}",
        f"{one.names[0]}{more}",
        one.problem,
        time_text(one.plain_s * 1e9),
        "" if one.tuned_s is None else time_text(one.tuned_s * 1e9),
        "" if one.tuned_s is None else f"{one.plain_s / one.tuned_s:.3f}",
        "taken" if one.is_taken else "left",
        one.reason,
    )
