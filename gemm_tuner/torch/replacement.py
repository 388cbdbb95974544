"""Linear layers of a model call tuned kernels, in eager mode."""

import logging
from typing import Any, Literal

from gemm_tuner.errors import GemmTunerError, InvalidSetting
from gemm_tuner.layers.sources import AnySource, FoundLayer, Source, WantedLayer, open_source
from gemm_tuner.torch.calls import calls_of
from gemm_tuner.torch.model_layers import ModelLayer, Rows, model_layers
from gemm_tuner.torch.operators import OperatorLayer, add_layer, library
from gemm_tuner.torch.report import LayerReport, Report
from gemm_tuner.torch.tuned_linear import (
    PackedLayer,
    TunedLinear,
    refresh_layer,
    restore_layer,
)

_LOG = logging.getLogger(__name__)

Tune = Literal["never", "wait"]
Reduction = Literal["any", "fixed"]


def replace(
    model: Any,  # noqa: ANN401 - a module
    example_inputs: Any = None,  # noqa: ANN401 - tensors
    *,
    rows: Rows | None = None,
    source: AnySource = None,
    tune: Tune = "never",
    budget_s: float = 10.0,
    reduction: Reduction = "any",
) -> Report:
    """Let the linear layers of a model call tuned kernels, and return what became of each.

    The layers stay the modules that they are, with their parameters, hooks and `state_dict`, and
    become `TunedLinear`. A layer without a kernel stays as it is. `restore` takes it back.

    Args:
        model: a `torch.nn.Module`, changed in place.
        example_inputs: what the model is called with, once, to see how many rows each layer gets: a
            tensor, a tuple, or a dict of keyword arguments; or a list of these.
        rows: the numbers of rows instead, such as `[1, 128]` or `["1..64"]`.
        source: where kernels come from: a `Client`, the address of a service, the URL of a
            database, the path of a lock file; by default the user's own database.
        tune: `never`, or `wait` to tune what is missing in the database first.
        budget_s: the time to tune one layer, in seconds.
        reduction: `any`, or `fixed` for rows of y that have the same bits whatever the other rows
            are, and how many. Such a layer refuses a call that no kernel is for.

    Raises:
        InvalidSetting: neither inputs nor rows are given, or both, or an argument cannot be used.
        GemmTunerError: the source cannot be opened, or the operators cannot be built.
    """
    if tune not in ("never", "wait"):
        raise InvalidSetting(f"tune = {tune!r} is not known; use 'never' or 'wait'.")
    if reduction not in ("any", "fixed"):
        raise InvalidSetting(f"reduction = {reduction!r} is not known; use 'any' or 'fixed'.")
    if (example_inputs is None) == (rows is None):
        raise InvalidSetting("give either example_inputs or rows, so that m is known.")
    library()
    opened = open_source(source)
    calls = [] if rows is not None else calls_of(example_inputs)
    reports: list[LayerReport] = []
    found: dict[WantedLayer, FoundLayer] = {}
    for one in model_layers(model, calls=calls, rows=rows, reduction=reduction):
        wanted = one.wanted
        if wanted is None:
            reports.append(one.report(one.why_left or "", is_taken=False))
            continue
        if wanted not in found:
            found[wanted] = _find(opened, wanted, budget_s if tune == "wait" else None)
        reports.append(_replace_one(one, wanted, found[wanted], opened))
    report = Report(reports)
    if not report.taken:
        _LOG.warning("The model computes as it would without gemm-tuner. %s", report)
    return report


def restore(model: Any) -> None:  # noqa: ANN401 - a module
    """Make the layers that `replace` or `tune_model` changed ordinary ones again."""
    for module in model.modules():
        restore_layer(module)


def refresh(model: Any) -> None:  # noqa: ANN401 - a module
    """Let layers that call tuned kernels pack their weights again, each at its next call.

    It is needed where weights were written in a way that PyTorch does not count: through
    `weight.data` or NumPy, or by another process.
    """
    for module in model.modules():
        refresh_layer(module)


def install(one: ModelLayer, wanted: WantedLayer, layer: OperatorLayer, source: Source) -> None:
    """Let a layer of a model call kernels."""
    one.module.__class__ = TunedLinear
    one.module.__dict__["_tuned"] = PackedLayer(wanted, source.text, layer)


def _find(source: Source, wanted: WantedLayer, budget_s: float | None) -> FoundLayer:
    """Return the kernels for a layer, tuned first if there is a budget, or why there are none."""
    try:
        if budget_s is not None:
            source.tune(wanted, budget_s)
        return source.find(wanted)
    except GemmTunerError as error:
        return FoundLayer(kernels=(), reasons=(str(error),))


def _replace_one(
    one: ModelLayer, wanted: WantedLayer, found: FoundLayer, source: Source
) -> LayerReport:
    if not found.kernels:
        restore_layer(one.module)
        return one.report(" ".join(found.reasons), is_taken=False)
    install(one, wanted, add_layer(found.kernels), source)
    reasons = dict.fromkeys(kernel.reason for kernel in found.kernels)
    return one.report(" ".join([*reasons, *found.reasons]), is_taken=True)
