"""Linear layers, products and attention of a model call tuned kernels, in eager mode."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from gemm_tuner.domain.units import time_text
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.layers.background import BackgroundTuning
from gemm_tuner.layers.limited import within
from gemm_tuner.layers.sources import (
    AnySource,
    Source,
    Tune,
    check_tuning,
    find_or_tell,
    open_source,
    tune_or_tell,
)
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer
from gemm_tuner.torch.asking import (
    check_rows,
    problem_text,
    without_old_kernels,
)
from gemm_tuner.torch.calls import calls_of
from gemm_tuner.torch.eager.integer_weights import is_of_torchao
from gemm_tuner.torch.eager.model_layers import ModelLayer, Rows, model_layers
from gemm_tuner.torch.eager.model_products import ModelProducts, Seeing, without_seen
from gemm_tuner.torch.eager.packed_by_onednn import PackedByOneDnn, rows_by_onednn
from gemm_tuner.torch.eager.packed_linear import hold_all_weights
from gemm_tuner.torch.eager.tuned_conv1d import conv1d_classes
from gemm_tuner.torch.eager.tuned_linear import (
    PackedLayer,
    TunedLinear,
    hold_in,
    refresh_layer,
    restore_layer,
)
from gemm_tuner.torch.eager.tuned_products import TunedProducts, install_copying, restore_products
from gemm_tuner.torch.eager.weight_only_linear import PackedIntegers, WeightOnlyLinear
from gemm_tuner.torch.linear_modules import is_conv1d
from gemm_tuner.torch.operators import OperatorLayer, add_layer, library
from gemm_tuner.torch.report import LayerReport, Report

_LOG = logging.getLogger(__name__)

# What a function of PyTorch takes longer where products are looked for (Zen 3, in BERT's modules).
_LOOK_NS = 3_000.0

_BY_ONEDNN = "oneDNN computes it here, where PyTorch would call MKL."

Reduction = Literal["any", "fixed"]


def replace(
    model: Any,  # noqa: ANN401 - a module
    example_inputs: Any = None,  # noqa: ANN401 - tensors
    *,
    rows: Rows | None = None,
    source: AnySource = None,
    tune: Tune = "never",
    budget_s: float = 10.0,
    total_budget_s: float | None = None,
    reduction: Reduction = "any",
) -> Report:
    """Let a model call tuned kernels, and return what became of each of its layers.

    Linear layers stay the modules that they are, with their parameters, hooks and `state_dict`, and
    become `TunedLinear`, or `TunedConv1D` of transformers' `Conv1D`. A module that calls
    `scaled_dot_product_attention`, `torch.matmul` or `torch.bmm` of two activations, or
    `torch.nn.functional.grouped_mm` as experts do, gets a `forward` around its own, where a verdict
    serves a kernel for it. What has no kernel stays as it is. `restore` takes it back.

    Args:
        model: a `torch.nn.Module`, changed in place.
        example_inputs: what the model is called with, once, to see how many rows each layer gets: a
            tensor, a tuple, or a dict of keyword arguments; or a list of these.
        rows: the numbers of rows of linear layers, such as `[1, 128]` or `["1..64"]`, in the place
            of those that the example inputs show. Without such inputs, nothing else is taken.
        source: where kernels come from: a `Client`, the address of a service, the URL of a
            database, the path of a lock file; by default the user's own database.
        tune: `never`; or what the source lacks is tuned, by `wait` first, or by `background` while
            the model runs, for the next `replace`. A service is waited for up to a minute a layer.
        budget_s: the time to tune a layer for one number of rows, in seconds; a range such as
            `1..64` is tuned at several. A service has its own.
        total_budget_s: the time to tune all of them, in seconds, after which the others are left as
            they are; by default as long as it takes.
        reduction: `any`, or `fixed` for rows of y that have the same bits whatever the other rows
            are, and how many. Such a layer refuses a call that no kernel is for; products of
            activations stay as they are.

    Raises:
        InvalidSetting: neither inputs nor rows are given, or an argument cannot be used.
        GemmTunerError: the source cannot be opened, or the operators cannot be built.
    """
    budget_s = check_tuning(tune, budget_s)
    if reduction not in ("any", "fixed"):
        raise InvalidSetting(f"reduction = {reduction!r} is not known; use 'any' or 'fixed'.")
    if example_inputs is None and rows is None:
        raise InvalidSetting("give example_inputs or rows, so that m is known.")
    if rows is not None:
        check_rows("rows", rows)
        if not rows:
            raise InvalidSetting("rows is empty; give the numbers of rows, such as [1, '2..64'].")
    library()
    opened = within(open_source(source, may_tune=True), total_budget_s)
    hold_all_weights(model)
    calls = [] if example_inputs is None else calls_of(example_inputs)
    seeing = Seeing(model)
    layers = model_layers(model, calls=calls, rows=rows, reduction=reduction, around=seeing.on())
    products = seeing.found if reduction == "any" else []
    layers = without_seen(layers, products)
    asked = dict.fromkeys(one.wanted for one in layers if one.wanted)
    asked |= dict.fromkeys(wanted for one in products for wanted in one.wanted)
    tuned_s = budget_s if tune == "wait" else None
    found = {wanted: _find(opened, wanted, tuned_s) for wanted in asked}
    if tune == "background":
        background = BackgroundTuning(opened, budget_s)
        for wanted in asked:
            background.add(wanted)
    reports = [_replace_one(one, found, opened) for one in layers]
    for each in products:
        reports += _replace_products(each, found, opened)
    report = Report(reports)
    if not report.taken and not any(_BY_ONEDNN in one.reason for one in report):
        _LOG.warning(
            "The model computes as it would without gemm-tuner: %s; print what replace returns to "
            "see why.",
            report.summary,
        )
    return report


def restore(model: Any) -> None:  # noqa: ANN401 - a module
    """Make the layers that `replace` or `tune_model` changed ordinary ones again."""
    hold_all_weights(model)
    for module in model.modules():
        restore_layer(module)
        restore_products(module)


def refresh(model: Any) -> None:  # noqa: ANN401 - a module
    """Let layers that call tuned kernels pack their weights again, each at its next call.

    It is needed where weights were written in a way that PyTorch does not count: through
    `weight.data` or NumPy, or by another process.
    """
    for module in model.modules():
        refresh_layer(module)


def install(one: ModelLayer, wanted: WantedLayer, layer: OperatorLayer, source: Source) -> None:
    """Let a layer of a model call kernels."""
    kind = PackedIntegers if is_of_torchao(one.module.weight) else PackedLayer
    hold_in(one.module, kind(wanted, source.text, layer, module_class=_class_for(one.module)))


def install_products(
    one: ModelProducts, layers: Sequence[OperatorLayer], source: Source
) -> TunedProducts:
    """Let products and attention of a module call kernels."""
    tuned = TunedProducts(one.module, one.name, one.wanted, source.text, layers)
    vars(one.module)["forward"] = tuned
    install_copying(type(one.module))
    return tuned


def _class_for(module: Any) -> Any:  # noqa: ANN401 - a module and a class
    """Return the class that a linear layer gets where it is computed from packed weights."""
    if is_conv1d(module):
        return conv1d_classes()[1]
    return WeightOnlyLinear if is_of_torchao(module.weight) else TunedLinear


def _find(source: Source, wanted: WantedLayer, budget_s: float | None) -> FoundLayer:
    """Return the kernels for a layer, tuned first if there is a budget, or why there are none."""
    failure = "" if budget_s is None else tune_or_tell(source, wanted, budget_s)
    found = without_old_kernels(find_or_tell(source, wanted))
    reasons = (failure, *found.reasons) if failure else found.reasons
    return dataclasses.replace(found, reasons=reasons)


def _replace_one(
    one: ModelLayer, found: Mapping[WantedLayer, FoundLayer], source: Source
) -> LayerReport:
    wanted = one.wanted
    if wanted is None:
        restore_layer(one.module)
        return one.report(one.why_left or "", is_taken=False)
    own = found[wanted]
    if not own.kernels:
        restore_layer(one.module)
        is_replaced = one.reduction == "any" and bool(rows_by_onednn(wanted, own.fastest))
        if is_replaced:
            hold_in(one.module, PackedByOneDnn(wanted, None, module_class=_class_for(one.module)))
        why_left = [*own.reasons, _BY_ONEDNN if is_replaced else ""]
        return one.report(" ".join(filter(None, why_left)), is_taken=False)
    install(one, wanted, add_layer(own.kernels), source)
    reasons = dict.fromkeys(kernel.reason for kernel in own.kernels)
    return one.report(" ".join([*reasons, *own.reasons]), is_taken=True)


def _replace_products(
    one: ModelProducts, found: Mapping[WantedLayer, FoundLayer], source: Source
) -> Iterator[LayerReport]:
    """Let a module call the kernels that there are, and yield what became of each product."""
    why_left = one.why_left or _why_slower(one, found)
    kernels = {} if why_left else {each: found[each].kernels for each in one.wanted}
    layers = [add_layer(each) for each in kernels.values() if each]
    restore_products(one.module)
    if layers:
        install_products(one, layers, source)
    for wanted, batch in zip(one.wanted, one.batches, strict=True):
        is_taken = bool(kernels.get(wanted))
        reasons = [*found[wanted].reasons] if why_left is None else [why_left]
        if is_taken:
            reasons = [*dict.fromkeys(each.reason for each in kernels[wanted]), *reasons]
        yield LayerReport(
            name=one.name,
            problem=problem_text(wanted, batch),
            rows=wanted.rows,
            is_taken=is_taken,
            reason=" ".join(filter(None, reasons)),
        )


def _why_slower(one: ModelProducts, found: Mapping[WantedLayer, FoundLayer]) -> str | None:
    """Return why a module is not faster with its kernels, None if it is, or if nobody knows."""
    threads, saved_ns = torch.get_num_threads(), 0.0
    for wanted, batch in zip(one.wanted, one.batches, strict=True):
        own = found[wanted]
        if own.kernels and own.saved_ns is None:
            return None
        if own.kernels and own.saved_ns is not None:
            saved_ns += own.saved_ns * batch / (threads if wanted.threads == 1 else 1)
    cost_ns = one.looks * _LOOK_NS
    if not saved_ns or saved_ns > cost_ns:
        return None
    return (
        f"its kernels save {time_text(max(0.0, saved_ns))} of a call, and to look for its products "
        f"among the {one.looks:.0f} functions that the module calls takes {time_text(cost_ns)}."
    )
