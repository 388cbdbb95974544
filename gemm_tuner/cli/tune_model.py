"""`gemm-tuner tune-model`: tune the models of a script, and print what they gain."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.script import (
    Arguments,
    Script,
    check_script,
    load_pytorch,
    run_script,
)
from gemm_tuner.cli.terminal.interrupt import aborting
from gemm_tuner.cli.terminal.measuring import measuring
from gemm_tuner.cli.terminal.output import print_json, print_line, print_message, print_table
from gemm_tuner.domain.units import counted, duration_text, time_text
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.store.sql.database import default_database_url, open_database

if TYPE_CHECKING:
    from gemm_tuner.torch.calls import CalledModel, Capturing
    from gemm_tuner.torch.model.gains import LayerGain, ModelGain

_BUDGET = "10m"


def tune_model(
    script: Script,
    arguments: Arguments = None,
    *,
    budget: options.ModelBudget = _BUDGET,
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> int:
    """Tune the models that a script runs, and print what they gain.

    The script runs once; then its models are called as it called them, without gradients. The time
    goes to their linear layers, their products of two activations and their attention by their
    shares of the time of the model.
    """
    check_script(script, "tune-model")
    budget_s = options.parse_duration_or_none_s(budget)
    url = db or default_database_url()
    open_database(url).dispose()
    with aborting():
        return _tune_models(script, arguments or [], url, budget_s, db=db, as_json=as_json)


def _tune_models(
    script: Path,
    arguments: list[str],
    url: str,
    budget_s: float,
    *,
    db: str | None,
    as_json: bool,
) -> int:
    load_pytorch()
    from gemm_tuner.torch.calls import Capturing  # noqa: PLC0415 - loads PyTorch
    from gemm_tuner.torch.operators import library  # noqa: PLC0415

    library()
    with Capturing() as capturing:
        code = run_script(script, arguments, is_aside=as_json)
    _tell_of_what_is_not_kept(capturing)
    models = [one for one in capturing.models.values() if one.calls]
    if not models:
        raise InvalidSetting(
            f"no model with linear layers was called in {str(script)!r} such that the call can be "
            "repeated; what other threads and processes call is not seen, nor what is compiled."
        )
    gains = []
    # What the models print while they are called again is no part of the report.
    with measuring(), redirect_stdout(sys.stderr):
        for one in models:
            gain = _tune(one, url, budget_s / len(models))
            if gain is not None:
                gains.append((one, gain))
    if not gains:
        raise InvalidSetting(
            f"no call of the models in {str(script)!r} can be repeated; give a script that calls "
            "them so that the same call can be made again."
        )
    if as_json:
        print_json({"models": [_facts(*one) for one in gains]})
    else:
        for one, gain in gains:
            _print(one, gain, url if db else None)
    return code


def _tell_of_what_is_not_kept(capturing: "Capturing") -> None:
    for name in capturing.compiled:
        print_message(
            f"{name} is under torch.compile, where its layers are not seen; use "
            'gemm_tuner.torch.enable(tune="wait") there.'
        )
    if capturing.dropped:
        print_message(
            f"Left out: {counted(capturing.dropped, 'more model')} that the script calls; give one "
            f"that calls no more than {len(capturing.models)}."
        )
    for one in capturing.models.values():
        reasons = {
            "their arguments cannot be copied": one.left_out,
            "they failed in the script": one.failed,
            f"they differ in shapes from the {len(one.calls)} kinds that are kept": one.dropped,
        }
        for reason, count in reasons.items():
            if count:
                print_message(f"{one.name}: calls that are left out, because {reason}: {count}.")


def _tune(model: "CalledModel", url: str, budget_s: float) -> "ModelGain | None":
    """Tune a model by those of its calls that can be repeated, or return None without any."""
    from gemm_tuner.torch.calls import NotRepeated  # noqa: PLC0415 - loads PyTorch
    from gemm_tuner.torch.model.tuning import tune_calls  # noqa: PLC0415

    def tell(step: str, left_s: float) -> None:
        left = f", {duration_text(left_s)} of the budget left" if left_s else ""
        print_message(f"{model.name}: {step}{left}")

    end_s = monotonic() + budget_s
    while model.calls:
        try:
            return tune_calls(
                model.module,
                list(model.calls.values()),
                source=url,
                # What was tuned until a call failed is found in the database.
                budget_s=max(0.0, end_s - monotonic()) if budget_s else 0.0,
                on_step=tell,
            )
        except NotRepeated as failed:
            call = model.calls.pop(failed.key)
            print_message(
                f"{model.name}: a call with {call.text} is left out, because it fails when it is "
                f"made again: {failed}."
            )
    return None


def _facts(model: "CalledModel", gain: "ModelGain") -> dict[str, Any]:
    return {
        "model": model.name,
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
                "is_served": one.is_served,
                "reason": one.reason,
            }
            for one in gain.layers
        ],
    }


def _print(model: "CalledModel", gain: "ModelGain", url: str | None) -> None:
    name = model.name
    calls = sum(one.count for one in model.calls.values())
    print_table(
        f"{name}, {counted(calls, 'call')}: times of all calls, in eager mode",
        (">share", "layers", "problem", ">PyTorch", ">kernel", ">speed", "", "why"),
        [_row(one) for one in gain.layers],
    )
    taken = sum(len(one.names) for one in gain.layers if one.is_taken)
    print_line(
        f"{name}: {time_text(gain.plain_s * 1e9)} before, {time_text(gain.tuned_s * 1e9)} now: "
        f"{gain.speedup:.3f} times as fast, by the kernels of {counted(taken, 'layer')}."
    )
    if taken:
        source = f", source={url!r}" if url else ""
        again = f"gemm_tuner.torch.tune_model(model, inputs{source}, budget_s=0)"
        if all(one.is_served for one in gain.layers if one.is_taken):
            other = f", or gemm_tuner.torch.replace(model, inputs{source})"
        else:
            other = "; gemm_tuner.torch.replace does not find all of them"
        print_line(f"To use them: {again}, which times them again{other}.")


def _row(one: "LayerGain") -> tuple[str, ...]:
    more = f" and {len(one.names) - 1} more" if len(one.names) > 1 else ""
    return (
        f"{one.share:.1%}",
        f"{one.names[0] or '(the model)'}{more}",
        one.problem,
        time_text(one.plain_s * 1e9),
        "" if one.tuned_s is None else time_text(one.tuned_s * 1e9),
        "" if one.speedup is None else f"{one.speedup:.3f}",
        "taken" if one.is_taken else "left",
        one.reason,
    )
