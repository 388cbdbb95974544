"""The linear layers of a model: what is to be asked for, or why a layer stays as it is."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gemm_tuner.torch.calls import Call
from gemm_tuner.torch.operators import TYPES
from gemm_tuner.torch.report import LayerReport
from gemm_tuner.torch.sources import WantedLayer
from gemm_tuner.torch.tuned_linear import TunedLinear

# They read the weights of the layers in them without calling these.
_BYPASSING: tuple[Any, ...] = (torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)

Rows = Sequence[int | str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelLayer:
    """A linear layer of a model, with the numbers of rows that it is called with.

    `wanted` is what kernels are asked for; where it is None, `why_left` says why none are.
    """

    name: str
    module: Any
    rows: tuple[int | str, ...]
    why_left: str | None

    @property
    def wanted(self) -> WantedLayer | None:
        """Return the layer to ask for."""
        if self.why_left:
            return None
        return WantedLayer(
            n=self.module.out_features,
            k=self.module.in_features,
            rows=self.rows,
            dtype=TYPES[self.module.weight.dtype],
            epilogue="none" if self.module.bias is None else "bias",
            threads=torch.get_num_threads(),
        )

    @property
    def problem(self) -> str:
        """Return what it computes, in words such as `f32 1,16x3072x768 bias`."""
        dtype = TYPES.get(self.module.weight.dtype, str(self.module.weight.dtype))
        shown = ",".join(str(one) for one in self.rows) or "?"
        bias = "" if self.module.bias is None else " bias"
        return f"{dtype} {shown}x{self.module.out_features}x{self.module.in_features}{bias}"

    def report(self, reason: str, *, is_taken: bool) -> LayerReport:
        """Return what became of it."""
        return LayerReport(
            name=self.name, problem=self.problem, rows=self.rows, is_taken=is_taken, reason=reason
        )


def model_layers(
    model: Any,  # noqa: ANN401 - a module
    *,
    calls: Sequence[Call] = (),
    rows: Rows | None = None,
) -> list[ModelLayer]:
    """Return the linear layers of a model, with the `rows` that are given, or that calls show."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    seen = (
        {name: tuple(rows) for name in modules}
        if rows is not None
        else _rows_seen(model, modules, calls)
    )
    bypassed = _bypassed(model, modules)
    return [
        ModelLayer(
            name=name,
            module=module,
            rows=seen[name],
            why_left=_why_left(module, seen[name], is_bypassed=name in bypassed),
        )
        for name, module in modules.items()
    ]


def _bypassed(model: Any, modules: Mapping[str, Any]) -> frozenset[str]:  # noqa: ANN401 - a module
    """Return the names of the layers whose parents read their weights without calling them."""
    parents = [name for name, module in model.named_modules() if isinstance(module, _BYPASSING)]
    return frozenset(
        name
        for name in modules
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


def _rows_seen(
    model: Any,  # noqa: ANN401 - a module
    modules: Mapping[str, Any],
    calls: Sequence[Call],
) -> dict[str, tuple[int, ...]]:
    """Call the model, and return the numbers of rows that each layer got."""
    seen: dict[str, set[int]] = {name: set() for name in modules}
    with _watching(modules, seen), torch.no_grad():
        for call in calls:
            call.on(model)
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
