"""The linear layers of a model: what is to be asked for, or why a layer stays as it is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import parametrize

from gemm_tuner.domain.printable import quoted
from gemm_tuner.layers.wanted import WantedLayer
from gemm_tuner.torch.calls import Call, compiled_in
from gemm_tuner.torch.eager.integer_weights import integers_of, is_of_torchao, why_not_read
from gemm_tuner.torch.eager.tuned_conv1d import conv1d_classes
from gemm_tuner.torch.eager.tuned_linear import TunedLinear
from gemm_tuner.torch.eager.weight_only_linear import WeightOnlyLinear
from gemm_tuner.torch.linear_modules import is_conv1d, is_linear, sizes_of
from gemm_tuner.torch.operators import TYPES
from gemm_tuner.torch.report import LayerReport

# They read the weights of the layers in them without calling these.
_BYPASSING: tuple[Any, ...] = (torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)

# They compute their products in an operator of PyTorch, from weights of several layers.
_RECURRENT: tuple[Any, ...] = (torch.nn.RNNBase, torch.nn.RNNCellBase)
_IN_OPERATOR = "its products are computed inside of PyTorch's operator, which is not replaced"

_OF_EXPERTS = (
    "it multiplies by stacks of matrices, as experts do, and no call of "
    "torch.nn.functional.grouped_mm was seen, which kernels take"
)
# Their weights have as many dimensions.
_CONVOLUTIONS: tuple[Any, ...] = (torch.nn.modules.conv._ConvNd,)  # noqa: SLF001 - of all of them
_DIMENSIONS_OF_STACKS = 3

_COMPILED = (
    "it is in a module that torch.compile has compiled, which calls no layer; use "
    "gemm_tuner.torch.enable before it is compiled"
)

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
    reduction: str = "any"

    @property
    def wanted(self) -> WantedLayer | None:
        """Return the layer to ask for."""
        if self.why_left:
            return None
        weight = self.module.weight
        integers = integers_of(weight)
        n, k = sizes_of(self.module)
        return WantedLayer(
            n=n,
            k=k,
            rows=self.rows,
            dtype=TYPES[weight.dtype] if integers is None else integers.types,
            epilogue="none" if self.module.bias is None else "bias",
            threads=torch.get_num_threads(),
            w_layout="nk" if integers is None else integers.w_layout,
            reduction=self.reduction,
        )

    @property
    def problem(self) -> str:
        """Return what it computes, in words such as `f32 1,16x3072x768 bias fixed`."""
        weight = self.module.weight
        integers = integers_of(weight)
        dtype = integers.types if integers else TYPES.get(weight.dtype, str(weight.dtype))
        shown = ",".join(str(one) for one in self.rows) or "?"
        bias = "" if getattr(self.module, "bias", None) is None else " bias"
        fixed = "" if self.reduction == "any" else f" {self.reduction}"
        n, k = sizes_of(self.module)
        sizes = f"{shown}x{n}x{k}"
        layout = f" {integers.w_layout}" if integers else ""
        return f"{dtype} {sizes}{layout}{bias}{fixed}"

    def report(self, reason: str, *, is_taken: bool) -> LayerReport:
        """Return what became of it."""
        return LayerReport(
            name=self.name, problem=self.problem, rows=self.rows, is_taken=is_taken, reason=reason
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherLayer(ModelLayer):
    """A module with products of its own, such as an LSTM or experts, which stays as it is."""

    @property
    def wanted(self) -> WantedLayer | None:
        """Return None: no kernel is asked for."""
        return None

    @property
    def problem(self) -> str:
        """Return its kind, such as `LSTM`."""
        return type(self.module).__name__


def model_layers(
    model: Any,  # noqa: ANN401 - a module
    *,
    calls: Sequence[Call] = (),
    rows: Rows | None = None,
    reduction: str = "any",
    around: AbstractContextManager[None] | None = None,
) -> list[ModelLayer]:
    """Return the linear layers of a model, with the `rows` that are given, or else that calls show.

    Recurrent modules and experts are among them, and stay as they are. The calls are made inside
    `around`.
    """
    compiled = compiled_in(model)
    modules = {name: module for name, module in model.named_modules() if is_linear(module)}
    watched = {name: one for name, one in modules.items() if id(one) not in compiled}
    seen: Mapping[str, tuple[int | str, ...]] = {}
    if calls:
        seen = _rows_seen(model, watched, calls, around or nullcontext())
    if rows is not None:
        seen = dict.fromkeys(modules, tuple(rows))
    bypassed = _bypassed(model, modules)
    found: list[ModelLayer] = []
    for name, module in model.named_modules():
        own = seen.get(name, ())
        if isinstance(module, _RECURRENT):
            found.append(OtherLayer(name=name, module=module, rows=(), why_left=_IN_OPERATOR))
        elif stacks := _stacks_of_matrices(module):
            of_experts = f"{_OF_EXPERTS} ({', '.join(map(quoted, stacks))})"
            found.append(OtherLayer(name=name, module=module, rows=(), why_left=of_experts))
        elif name in modules:
            left = _COMPILED if id(module) in compiled else None
            why = left or _why_left(module, own, is_bypassed=name in bypassed)
            found.append(
                ModelLayer(name=name, module=module, rows=own, why_left=why, reduction=reduction)
            )
    return found


def _stacks_of_matrices(module: Any) -> list[str]:  # noqa: ANN401 - a module
    """Return the names of parameters that are several matrices in one array."""
    if isinstance(module, _CONVOLUTIONS):
        return []
    return [
        name
        for name, weights in module.named_parameters(recurse=False)
        if not torch.nn.parameter.is_lazy(weights)
        and weights.is_floating_point()
        and weights.dim() == _DIMENSIONS_OF_STACKS
        and min(weights.shape) > 1  # others are positions, or added
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
    own = module._parameters  # noqa: SLF001 - as TunedModule reads them
    if parametrize.is_parametrized(module) or not {"weight", "bias"} <= set(own):
        return "its weights or its bias are computed from others, such as by torch.nn.utils.prune"
    weight = module.weight
    is_integers = is_of_torchao(weight)
    why_no_integers = why_not_read(weight) if is_integers else ""
    reasons = {
        "the module around it reads its weights without calling it": is_bypassed,
        f"it is a {type(module).__name__}, which may compute something else": type(module)
        not in (torch.nn.Linear, TunedLinear, WeightOnlyLinear)
        and not (is_conv1d(module) and type(module) in conv1d_classes()),
        "its forward was replaced by another function": "forward" in vars(module),
        "no call of it was seen with the example inputs; a model that reads its weights itself, "
        "or that is compiled, does not call it": not rows,
        "torchao computes in another type than that of its bias, such as of a model that was cast "
        "after it was quantised": (
            is_integers and module.bias is not None and module.bias.dtype != weight.dtype
        ),
        f"its weights are a {type(weight).__name__}, and {why_no_integers}": bool(why_no_integers),
        f"its weights are a {type(weight).__name__}": (
            type(weight) is not torch.nn.Parameter and not is_integers
        ),
        "its weights were made in inference mode, where PyTorch does not count their changes": (
            weight.is_inference()
        ),
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
    around: AbstractContextManager[None],
) -> dict[str, tuple[int, ...]]:
    """Call the model, and return the numbers of rows that each layer got."""
    seen: dict[str, set[int]] = {name: set() for name in modules}
    with _watching(modules, seen), torch.no_grad(), around:
        for call in calls:
            call.on(model)
    return {name: tuple(sorted(numbers)) for name, numbers in seen.items()}


@contextmanager
def _watching(modules: Mapping[str, Any], seen: Mapping[str, set[int]]) -> Iterator[None]:
    """Note the rows of each call, also of `layer.forward(x)`, which hooks do not see."""

    def watched(name: str, module: Any) -> Callable[..., Any]:  # noqa: ANN401 - a module
        own = vars(module).get("forward")

        def forward(*inputs: Any, **keywords: Any) -> Any:  # noqa: ANN401 - of the user
            x = inputs[0] if inputs else keywords.get("input", keywords.get("x"))
            _n, k = sizes_of(module)
            is_eager = not torch.compiler.is_compiling()
            if is_eager and isinstance(x, torch.Tensor) and k and x.numel():
                seen[name].add(x.numel() // k)
            if own is not None:
                return own(*inputs, **keywords)
            return type(module).forward(module, *inputs, **keywords)

        return forward

    before = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        vars(module)["forward"] = watched(name, module)
    try:
        yield
    finally:
        for name, module in modules.items():
            del vars(module)["forward"]
            if before[name] is not None:
                vars(module)["forward"] = before[name]
