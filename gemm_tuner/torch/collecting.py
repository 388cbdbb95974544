"""Which products a model computes: how often, of what sizes, and what share of its time."""

import csv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from io import StringIO
from itertools import chain
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.files import written_whole
from gemm_tuner.torch.calls import calls_of
from gemm_tuner.torch.graphs import ATTENTION
from gemm_tuner.torch.operators import TYPES
from gemm_tuner.torch.packed_linear import hold_all_weights
from gemm_tuner.torch.parameter_names import ParameterNames
from gemm_tuner.torch.quantised import BYTES, dequantised_from
from gemm_tuner.torch.weight_only import WEIGHT_ONLY_LAYOUT

_ATEN = torch.ops.aten
_WARM_UPS = 1

# What PyTorch copies heads with, so that they are one batch.
_COPIES = (_ATEN.clone.default, _ATEN._unsafe_view.default)  # noqa: SLF001 - so called

# What leaves the numbers as they are, and their order.
_SAME = (*_COPIES, _ATEN.view.default, _ATEN.alias.default)

# What takes the zero point of x off, and scales the sums of bytes.
_STEPS_OF_BYTES = ("x_zero_point", "channel_scale")

# Operators that are not made of others, as far as was seen.
_SIMPLE: set[Any] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    has_bias: bool
    w_layout: str
    scores: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(_Kind):
    """Products of one kind: y (m, n) = x (m, k) @ w, `batch` of them in a call.

    `weights` are the names of the parameters that they multiply with. Where there are none, w is
    computed by the model, and lies as `w_layout` says: where it was copied, as it lay before that.
    `share` is of the time of the model.

    Attention has steps to its `scores`: m queries, n keys, and heads of k elements.
    """

    weights: tuple[str, ...]
    calls: int
    seconds: float
    share: float

    @property
    def sizes(self) -> str:
        """Return the sizes as `128x3072x768`, with the batch before them."""
        sizes = f"{self.m}x{self.n}x{self.k}"
        return sizes if self.batch == 1 else f"{self.batch} of {sizes}"

    @property
    def operation(self) -> Operation:
        """Return whether w is constant, or whether this is attention."""
        if self.scores:
            return Operation.ATTENTION
        return Operation.LINEAR if self.weights else Operation.MATMUL

    @property
    def name(self) -> str:
        """Return a name for a file of layers: that of the first weights, or the sizes."""
        if self.scores:
            return f"attention_{self.n}x{self.k}"
        if not self.weights:
            return f"matmul_{self.n}x{self.k}_{self.w_layout}"
        return self.weights[0].removesuffix(".weight").replace(".", "_")

    @property
    def problem(self) -> str:
        """Return the problem of one of them as text, as `gemm-tuner resolve` takes its words."""
        words = self.operation.words
        sizes = f"{self.m}x{self.n}x{self.k}"
        steps = self.scores or f"{self.w_layout} {'bias' if self.has_bias else 'none'}"
        return " ".join([*words, self.dtype, sizes, steps])

    @property
    def weights_text(self) -> str:
        """Return the first of the weights and how many more there are, or the problem."""
        if not self.weights:
            return f"none: {self.problem}"
        more = f" and {len(self.weights) - 1} more" if len(self.weights) > 1 else ""
        return f"{self.weights[0]}{more}"


class Collected(Sequence[Product]):
    """The products of a model, the longest first; printed, a table."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = tuple(sorted(products, key=lambda one: -one.seconds))

    def __getitem__(self, place: int) -> Product:  # type: ignore[override]  # no slices
        """Return one kind of product."""
        return self._products[place]

    def __len__(self) -> int:
        """Return the number of kinds."""
        return len(self._products)

    @property
    def rest(self) -> float:
        """Return the share of the time that everything else takes."""
        return max(0.0, 1.0 - sum(one.share for one in self))

    def __str__(self) -> str:
        """Return a table."""
        width = max([5, *(len(one.dtype) for one in self)])
        lines = [f"{'share':>6}  {'calls':>5}  {'type':{width}} {'m x n x k':24} weights"]
        for one in self:
            sizes = f"{one.sizes} +bias" if one.has_bias else one.sizes
            lines.append(
                f"{one.share:6.1%}  {one.calls:5}  {one.dtype:{width}} {sizes:24} "
                f"{one.weights_text}"
            )
        lines.append(f"{self.rest:6.1%}  everything else, such as operators without such products")
        return "\n".join(lines)

    def write_layers(self, path: Path | str, *, dtype: str = "f32") -> int:
        """Write the products of one type as `gemm-tuner sweep` reads them.

        A batch is tuned as one of its products. Of bytes, only products with constant weights are
        written, since no other is computed by kernels.

        Returns:
            How many were written.
        """
        layers = [
            one
            for one in self
            if one.dtype == dtype
            and one.m * one.n * one.k
            and (one.weights or dtype in TYPES.values())
            and (not one.scores or _is_problem(one.problem))
        ]
        table = StringIO(newline="")
        writer = csv.writer(table, lineterminator="\n")
        columns = ("name", "m", "n", "k", "epilogue", "w_layout", "operation", "from")
        writer.writerow(columns)
        for one in layers:
            name = f"{one.name}_m{one.m}"
            first = _STEPS_OF_BYTES if dtype.endswith("_s8_s32_f32") else ()
            last = ["bias"] if one.has_bias else []
            epilogue = one.scores or "+".join([*first, *last]) or "none"
            told = f"{one.calls} calls, {one.share:.1%} of the time"
            how = epilogue, one.w_layout, one.operation.value
            writer.writerow([name, one.m, one.n, one.k, *how, told])
        with written_whole(Path(path)) as file:  # names of modules are any text
            file.write(table.getvalue().encode(errors="backslashreplace"))
        return len(layers)


def _is_problem(text: str) -> bool:
    """Return whether kernels are generated for such a problem."""
    try:
        Problem.parse(text)
    except GemmTunerError:
        return False
    return True


@dataclass(slots=True)
class _Seen:
    calls: int = 0
    seconds: float = 0.0
    weights: dict[str, None] = field(default_factory=dict)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]  # without PyTorch, it is Any
    """Times the products that run below it in one thread."""

    def __init__(self, names: ParameterNames) -> None:
        super().__init__()
        self._names = names
        self._casts: dict[str, Any] = {}  # held, as autocast does: else others get their memory
        self._bytes = ParameterNames()  # the types of the bytes that floats were made of
        self._turned = ParameterNames()  # copies whose matrices lay the other way round before
        self._repeats = WeakTensorKeyDictionary()  # of the same heads, in keys
        self.seen: dict[_Kind, _Seen] = {}

    def collected(self, whole_s: float, repeats: int = 1) -> Collected:
        """Return what was seen in `whole_s` seconds, as one of `repeats` calls."""
        return Collected(
            [
                Product(
                    **asdict(kind),
                    weights=tuple(seen.weights),
                    calls=seen.calls // repeats,
                    seconds=seen.seconds / repeats,
                    share=min(1.0, seen.seconds / whole_s),
                )
                for kind, seen in self.seen.items()
            ]
        )

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401 - an operator
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what it returns
        factors = _factors(function, args)
        attention = _attention(function, args, kwargs or {})
        if (
            factors is None
            and attention is None
            and isinstance(function, OpOverload)
            and function not in _SIMPLE
            and not any(isinstance(one, torch.Tensor) and one.is_nested for one in args)
        ):
            # In inference mode nothing was taken apart yet.
            with self:
                result = function.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
            _SIMPLE.add(function)
        begin_s = perf_counter()
        result = function(*args, **(kwargs or {}))
        seconds = perf_counter() - begin_s
        self._note_cast(function, args, result)
        if function in _COPIES and self._layout_of(args[0]) != _layout_of(result):
            self._turned.add(result, "")
        given = dequantised_from(function, args)
        if given is not None:
            self._bytes.add(result, BYTES[given.dtype])
            name = self._names.of(given)
            if name is not None:
                self._names.add(result, name)
        self._note_repeats(function, args, result)
        if attention is not None:
            self._add(self._joined(attention, *args[:2]), seconds)
        if factors is not None:
            self._add_product(*factors, seconds)
        return result

    def _note_cast(self, function: Any, args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401
        """Note weights that were cast: what autocast calls, and what makes floats of bytes."""
        name = self._names.of(args[0]) if function is _ATEN._to_copy.default else None  # noqa: SLF001
        if name is None:
            return
        self._casts[name] = result
        self._names.add(result, name)
        if args[0].dtype is torch.int8:  # weights of bytes alone
            self._bytes.add(result, BYTES[torch.int8])

    def _note_repeats(self, function: Any, args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401
        """Note how often heads of keys are repeated: (b, heads, repeats, n, d), then copied."""
        repeats = self._repeats.get(args[0]) if function in _SAME else None
        if function is _ATEN.expand.default and args[0].dim() == 5 and args[0].shape[2] == 1:
            repeats = result.shape[2]
        if repeats is not None:
            self._repeats[result] = repeats

    def _joined(self, kind: _Kind, q: Any, k: Any) -> _Kind:  # noqa: ANN401 - tensors
        """Return attention as kernels compute it: heads of one query that share keys are rows."""
        repeats = self._repeats.get(k, q.shape[1] // max(1, k.shape[1]))
        if kind.m != 1 or repeats < 2 or kind.scores.endswith("causal"):
            return kind
        return replace(kind, m=repeats, batch=kind.batch // repeats)

    def _add_product(self, x: Any, w: Any, bias: Any, seconds: float) -> None:  # noqa: ANN401
        name = self._names.of(w)
        batch, m = x.shape[0] if x.dim() == 3 else 1, x.shape[-2]
        if name is not None and batch > 1 and w.stride(0) == 0:  # one w, as of a layer
            batch, m = 1, batch * m
        kind = _Kind(
            batch=batch,
            m=m,
            n=w.shape[-1],
            k=x.shape[-1],
            dtype=self._types_of(x, w),
            has_bias=bias is not None,
            w_layout=self._layout_of(w) if name is None else self._w_layout(x, w),
        )
        seen = self._add(kind, seconds)
        if name is not None:
            seen.weights[name] = None

    def _add(self, kind: _Kind, seconds: float) -> _Seen:
        seen = self.seen.setdefault(kind, _Seen())
        seen.calls += 1
        seen.seconds += seconds
        return seen

    def _types_of(self, x: Any, w: Any) -> str:  # noqa: ANN401 - tensors
        """Return the types of a product: those of floats may be of the bytes they were made of."""
        x_type, w_type, floats = self._bytes.of(x), self._bytes.of(w), _type_of(x)
        if w_type and x_type:
            return f"{x_type}_{w_type}_s32_f32"
        return floats if w_type is None else f"{floats}_{w_type}_f32_{floats}"

    def _w_layout(self, x: Any, w: Any) -> str:  # noqa: ANN401 - tensors
        """Return how constant weights are named: those of bytes alone have a scale for each row."""
        is_weight_only = self._bytes.of(w) is not None and self._bytes.of(x) is None
        return WEIGHT_ONLY_LAYOUT if is_weight_only else WeightLayout.NK.value

    def _layout_of(self, w: Any) -> str:  # noqa: ANN401 - a tensor
        """Return how matrices (k, n) lie, or lay before they were copied."""
        own = _layout_of(w)
        if self._turned.of(w) is None:
            return own.value
        return (WeightLayout.KN if own is WeightLayout.NK else WeightLayout.NK).value


def _factors(function: Any, args: tuple[Any, ...]) -> tuple[Any, Any, Any] | None:  # noqa: ANN401
    """Return x, w and what is added to their product, or None if it is no product of a model."""
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - in a backward pass
        return None
    if function in (_ATEN.mm.default, _ATEN.bmm.default):
        return args[0], args[1], None
    if function in (_ATEN.addmm.default, _ATEN.baddbmm.default):
        return args[1], args[2], args[0] if args[0].dim() == 1 else None
    return None


def _attention(
    function: Any,  # noqa: ANN401 - an operator
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> _Kind | None:
    """Return what attention an operator computes, or None if it is none that kernels compute."""
    if function is not ATTENTION:
        return None
    q, k = args[:2]
    batch, heads, m, size = q.shape
    n = k.shape[2]
    is_causal = len(args) > 4 and args[4]
    if is_causal and m != n:  # PyTorch hides others then
        return None
    mask = ["add"] if keywords.get("attn_mask") is not None else []
    return _Kind(
        batch=batch * heads,
        m=m,
        n=n,
        k=size,
        dtype=_type_of(q),
        has_bias=False,
        w_layout=WeightLayout.NK.value,
        scores="+".join(["scale", *mask, *(["causal"] if is_causal else [])]),
    )


def _layout_of(w: Any) -> WeightLayout:  # noqa: ANN401 - a tensor
    """Return how matrices (k, n) lie."""
    has_columns = w.dim() > 1 and w.stride(-1) != 1 and w.stride(-2) == 1
    return WeightLayout.NK if has_columns else WeightLayout.KN


def _type_of(tensor: Any) -> str:  # noqa: ANN401 - a tensor
    return TYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def collect(
    model: Any,  # noqa: ANN401 - a module
    example_inputs: Any,  # noqa: ANN401 - tensors
    *,
    repeats: int = 3,
) -> Collected:
    """Return the products that a model computes for inputs, with their shares of its time.

    The model is called without gradients, once to warm up and then `repeats` times; what is told of
    is one call.

    Args:
        model: a `torch.nn.Module`, or anything that is called.
        example_inputs: a tensor, a tuple, or a dict of keyword arguments; or a list of these, such
            as the batches that a server sees.
        repeats: how often each is called.
    """
    calls = calls_of(example_inputs)
    hold_all_weights(model)
    names = ParameterNames()
    recorder = _Recorder(names)
    with torch.no_grad():
        for call in calls * _WARM_UPS:
            call.on(model)
        if isinstance(model, torch.nn.Module):  # whose parameters are made by now
            for name, parameter in (*model.named_buffers(), *model.named_parameters()):
                names.add(parameter, name)
        torch.clear_autocast_cache()  # so that what is converted is seen
        begin_s = perf_counter()
        with recorder:
            for call in calls * repeats:
                call.on(model)
        whole_s = perf_counter() - begin_s
    return recorder.collected(whole_s, repeats)


class Recording:
    """Collects the products that this thread computes in a `with` block, whatever module asks.

    The time of the model is that of the outermost modules.
    """

    def __init__(self) -> None:
        self._names = ParameterNames()
        self._recorder = _Recorder(self._names)
        self._paths: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._exits = ExitStack()
        self._thread = get_ident()
        self._depth = 0
        self._begin_s = 0.0
        self._seconds = 0.0

    def __enter__(self) -> Self:
        """Begin."""
        hooks = torch.nn.modules.module
        for handle in (
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._exits.callback(handle.remove)
        self._exits.enter_context(self._recorder)
        return self

    def __exit__(self, *_error: object) -> None:
        """End."""
        self._exits.close()

    @property
    def collected(self) -> Collected:
        """Return the products of all calls."""
        products_s = sum(one.seconds for one in self._recorder.seen.values())
        return self._recorder.collected(max(self._seconds, products_s, 1e-9))

    def _enter_module(self, module: Any, _inputs: object) -> None:  # noqa: ANN401 - a module
        if get_ident() != self._thread:
            return
        if not self._depth:
            self._begin_s = perf_counter()
        self._depth += 1
        if module not in self._paths:
            root = type(module).__name__
            for name, one in module.named_modules():
                self._paths[one] = f"{root}.{name}" if name else root
        own = (module.named_buffers(recurse=False), module.named_parameters(recurse=False))
        for name, parameter in chain(*own):
            self._names.add(parameter, f"{self._paths[module]}.{name}")

    def _leave_module(self, _module: object, _inputs: object, _output: object) -> None:
        if get_ident() != self._thread:
            return
        self._depth -= 1
        if not self._depth:
            self._seconds += perf_counter() - self._begin_s
