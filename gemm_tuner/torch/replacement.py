"""Linear layers of a model call tuned kernels, in eager mode."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional

from gemm_tuner.errors import GemmTunerError, InvalidSetting
from gemm_tuner.torch.collecting import call_with
from gemm_tuner.torch.operators import TYPES, OperatorLayer, add_layer, library
from gemm_tuner.torch.report import LayerReport, Report
from gemm_tuner.torch.sources import AnySource, FoundLayer, Source, WantedLayer, open_source

# They read the weights of the layers in them without calling these.
_BYPASSING: tuple[Any, ...] = (torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)

_LOG = logging.getLogger(__name__)

Rows = Sequence[int | str]
Tune = Literal["never", "wait"]


class TunedLinear(torch.nn.Linear):  # type: ignore[misc]  # without PyTorch, it is Any
    """A linear layer that calls a tuned kernel where it can, and is an ordinary one elsewhere.

    Its parameters are those of the layer that it was, and so are their names in a `state_dict`. The
    packed copy follows when they change in place or are replaced.

    What is recorded for a derivative, a subclass of `Tensor`, or what is being traced, exported or
    compiled goes the ordinary way, and so does a number of rows that no kernel is for.
    """

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        """Return `x @ weight.T + bias`; x is (..., k), y is (..., n)."""
        parameters = self._parameters  # self.weight costs as much as a small product
        weight, bias = parameters["weight"], parameters["bias"]
        packed = None if _is_followed() else self._tuned.packed_now(weight)
        if packed is None:
            return functional.linear(x, weight, bias)
        return torch.ops.gemm_tuner.linear_or_plain.default(x, weight, bias, *packed)


def _is_followed() -> bool:
    """Return whether a compiler or a tracer follows what is called, to repeat it later."""
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing())


@dataclass(slots=True, eq=False)
class _Tuned:
    """The kernels of one layer, and the weights packed for them."""

    wanted: WantedLayer
    source: str | None  # where a copy in another process asks; None for nowhere
    layer: OperatorLayer | None = None
    is_looked_up: bool = True
    packed: tuple[Any, int] | None = None  # and the number of the layer
    packed_at: tuple[int, int] | None = None
    weight: Any = None  # as it was packed: while it is held, nothing else gets its address

    def __deepcopy__(self, _memo: object) -> "_Tuned":
        """Return the same kernels for other weights, which are packed when they are used."""
        return _Tuned(self.wanted, self.source, self.layer, self.is_looked_up)

    def __reduce__(self) -> tuple[object, ...]:
        """Return what asks for the kernels again in the process where it is unpickled."""
        return _Tuned, (self.wanted, self.source, None, self.source is None)

    def packed_now(self, weight: Any) -> tuple[Any, int] | None:  # noqa: ANN401 - a tensor
        """Return the weights packed, again if they changed since, and the number of the layer."""
        try:
            now = (weight._version, weight.data_ptr())  # noqa: SLF001 - nothing else tells
        except RuntimeError:  # made in inference mode, or of no memory
            now = None
        if now is None or now != self.packed_at:
            self.packed = self._pack(weight)
            self.packed_at, self.weight = now, weight.detach()
        return self.packed

    def _pack(self, weight: Any) -> tuple[Any, int] | None:  # noqa: ANN401 - a tensor
        if not self.is_looked_up:
            self._look_up()
        layer = self.layer
        if (
            layer is None
            or type(weight) is not torch.nn.Parameter
            or weight.is_inference()
            or weight.shape != (layer.problem.n, layer.problem.k)
            or TYPES.get(weight.dtype) != layer.problem.types.text
            or not weight.is_cpu
        ):
            return None
        with torch.no_grad():
            packed = torch.ops.gemm_tuner.pack(weight.detach(), layer.packed_bytes, layer.number)
        return packed, layer.number

    def _look_up(self) -> None:
        self.is_looked_up = True
        try:
            found = open_source(self.source).find(self.wanted)
            self.layer = add_layer(found.kernels) if found.kernels else None
        except GemmTunerError as error:
            _LOG.warning("A layer computes as it would without gemm-tuner: %s", error)


def replace(
    model: Any,  # noqa: ANN401 - a module
    example_inputs: Any = None,  # noqa: ANN401 - tensors
    *,
    rows: Rows | None = None,
    source: AnySource = None,
    tune: Tune = "never",
    budget_s: float = 10.0,
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

    Raises:
        InvalidSetting: neither inputs nor rows are given, or both, or an argument cannot be used.
        GemmTunerError: the source cannot be opened, or the operators cannot be built.
    """
    if tune not in ("never", "wait"):
        raise InvalidSetting(f"tune = {tune!r} is not known; use 'never' or 'wait'.")
    if (example_inputs is None) == (rows is None):
        raise InvalidSetting("give either example_inputs or rows, so that m is known.")
    library()
    opened = open_source(source)
    modules = _linear_modules(model)
    seen = (
        {name: tuple(rows) for name in modules}
        if rows is not None
        else _rows_seen(model, modules, example_inputs)
    )
    reports: list[LayerReport] = []
    found: dict[WantedLayer, FoundLayer] = {}
    bypassed = _bypassed(model)
    for name, module in modules.items():
        reason = _why_left(module, seen[name], is_bypassed=name in bypassed)
        if reason:
            reports.append(_report(name, module, seen[name], reason))
            continue
        wanted = _wanted(module, seen[name])
        if wanted not in found:
            found[wanted] = _find(opened, wanted, budget_s if tune == "wait" else None)
        reports.append(_replace_one(name, module, wanted, found[wanted], opened))
    report = Report(reports)
    if not report.taken:
        _LOG.warning("The model computes as it would without gemm-tuner. %s", report)
    return report


def _find(source: Source, wanted: WantedLayer, budget_s: float | None) -> FoundLayer:
    """Return the kernels for a layer, tuned first if there is a budget, or why there are none."""
    try:
        if budget_s is not None:
            source.tune(wanted, budget_s)
        return source.find(wanted)
    except GemmTunerError as error:
        return FoundLayer(kernels=(), reasons=(str(error),))


def restore(model: Any) -> None:  # noqa: ANN401 - a module
    """Make the layers that `replace` changed ordinary ones again."""
    for module in model.modules():
        if type(module) is TunedLinear:
            module.__class__ = torch.nn.Linear
            module.__dict__.pop("_tuned")


def _replace_one(
    name: str,
    module: Any,  # noqa: ANN401 - a module
    wanted: WantedLayer,
    found: FoundLayer,
    source: Source,
) -> LayerReport:
    if not found.kernels:
        if type(module) is TunedLinear:
            restore(module)
        return _report(name, module, wanted.rows, " ".join(found.reasons))
    layer = add_layer(found.kernels)
    module.__class__ = TunedLinear
    module.__dict__["_tuned"] = _Tuned(wanted, source.text, layer)
    reason = " ".join(dict.fromkeys(kernel.reason for kernel in found.kernels))
    return LayerReport(
        name=name,
        problem=_problem_text(module, wanted.rows),
        rows=wanted.rows,
        is_taken=True,
        reason=" ".join([reason, *found.reasons]),
    )


def _linear_modules(model: Any) -> dict[str, Any]:  # noqa: ANN401 - a module
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def _bypassed(model: Any) -> frozenset[str]:  # noqa: ANN401 - a module
    """Return the names of the layers whose parents read their weights without calling them."""
    parents = [name for name, module in model.named_modules() if isinstance(module, _BYPASSING)]
    return frozenset(
        name
        for name in _linear_modules(model)
        if any(not parent or name.startswith(f"{parent}.") for parent in parents)
    )


def _why_left(module: Any, rows: Rows, *, is_bypassed: bool) -> str | None:  # noqa: ANN401
    """Return why a layer stays as it is before any kernel is asked for, or None."""
    weight = module.weight
    reasons = {
        "the module around it reads its weights without calling it": is_bypassed,
        f"it is a {type(module).__name__}, which may compute something else": type(module)
        not in (torch.nn.Linear, TunedLinear),
        "the example inputs do not reach it": not rows,
        f"its weights are a {type(weight).__name__}": type(weight) is not torch.nn.Parameter,
        f"its weights are on {weight.device}": not weight.is_cpu,
        f"its weights are {weight.dtype}, and kernels are for {' and '.join(TYPES.values())}": (
            weight.dtype not in TYPES
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _wanted(module: Any, rows: Rows) -> WantedLayer:  # noqa: ANN401 - a module
    return WantedLayer(
        n=module.out_features,
        k=module.in_features,
        rows=tuple(rows),
        dtype=TYPES[module.weight.dtype],
        epilogue="none" if module.bias is None else "bias",
        threads=torch.get_num_threads(),
    )


def _report(name: str, module: Any, rows: Rows, reason: str) -> LayerReport:  # noqa: ANN401
    return LayerReport(
        name=name,
        problem=_problem_text(module, rows),
        rows=tuple(rows),
        is_taken=False,
        reason=reason,
    )


def _problem_text(module: Any, rows: Rows) -> str:  # noqa: ANN401 - a module
    dtype = TYPES.get(module.weight.dtype, str(module.weight.dtype))
    shown = ",".join(str(one) for one in rows) or "?"
    bias = "" if module.bias is None else " bias"
    return f"{dtype} {shown}x{module.out_features}x{module.in_features}{bias}"


def _rows_seen(
    model: Any,  # noqa: ANN401 - a module
    modules: Mapping[str, Any],
    example_inputs: Any,  # noqa: ANN401 - tensors
) -> dict[str, tuple[int, ...]]:
    """Call the model, and return the numbers of rows that each layer got."""
    seen: dict[str, set[int]] = {name: set() for name in modules}
    with _watching(modules, seen), torch.no_grad():
        for inputs in example_inputs if isinstance(example_inputs, list) else [example_inputs]:
            call_with(model, inputs)
    return {name: tuple(sorted(numbers)) for name, numbers in seen.items()}


@contextmanager
def _watching(modules: Mapping[str, Any], seen: Mapping[str, set[int]]) -> Iterator[None]:
    def watch(name: str, k: int) -> Any:  # noqa: ANN401 - a handle of PyTorch
        def count(_module: object, inputs: tuple[Any, ...]) -> None:
            if inputs and k and inputs[0].numel():
                seen[name].add(inputs[0].numel() // k)

        return modules[name].register_forward_pre_hook(count)

    handles = [watch(name, module.in_features) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
