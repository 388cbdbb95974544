"""The products that a model computes, seen as its operators run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.torch.inductor.convolutions import IMAGE_DIMENSIONS, convolution_of
from gemm_tuner.torch.inductor.four_bits import PRODUCT as PRODUCT_OF_4_BITS
from gemm_tuner.torch.inductor.graphs import ATTENTION, SHOWS
from gemm_tuner.torch.inductor.quantised import BYTES, dequantised_from
from gemm_tuner.torch.inductor.weight_only import WEIGHT_ONLY_LAYOUT
from gemm_tuner.torch.model.parameter_names import ParameterNames, address_of
from gemm_tuner.torch.operators import TYPES

_ATEN = torch.ops.aten

# What PyTorch copies heads with, so that they are one batch.
_COPIES = (_ATEN.clone.default, _ATEN._unsafe_view.default)  # noqa: SLF001 - so called

# What leaves the numbers as they are, and their order.
_SAME = (*_COPIES, _ATEN.view.default, _ATEN.alias.default)

_TWO = 2  # factors, or summands

# What scales sums, and what adds a bias to them.
_MULTIPLIES = (_ATEN.mul.Tensor,)
_ADDS = (_ATEN.add.Tensor, _ATEN.add_.Tensor)

# What scales and shifts the channels of a convolution, with the statistics of training.
_NORMALISES = _ATEN._native_batch_norm_legit_no_training.default  # noqa: SLF001 - so called

# Operators that are not made of others, as far as was seen.
_SIMPLE: set[Any] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What products have in common that are listed as one, as in `collecting.Product`."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    has_bias: bool
    w_layout: str
    scores: str = ""


@dataclass(slots=True)
class Seen:
    """How often products of a kind were computed, in how long, and the names of their weights."""

    calls: int = 0
    seconds: float = 0.0
    weights: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Sum:
    """A product without a bias, whose y may be given one by the next operators."""

    y: Any  # held, else others get its memory
    kind: Kind
    seconds: float
    name: str | None
    is_normalised: bool = False


class Recorder(TorchDispatchMode):  # type: ignore[misc]  # without PyTorch, it is Any
    """Times the products that run below it in one thread."""

    def __init__(self, names: ParameterNames) -> None:
        super().__init__()
        self._names = names
        self._casts: dict[str, Any] = {}  # held, as autocast does: else others get their memory
        self._bytes = ParameterNames()  # the types of the bytes that floats were made of
        self._turned = ParameterNames()  # copies whose matrices lay the other way round before
        self._repeats = WeakTensorKeyDictionary()  # of the same heads, in keys
        self._sum: _Sum | None = None
        self.seen: dict[Kind, Seen] = {}

    supports_higher_order_operators = True  # which run as they are, without their products

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401 - an operator
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what it returns
        factors = _factors(function, args)
        is_convolution = function is _ATEN.convolution.default
        attention = _attention(function, args, kwargs or {})
        is_product = is_convolution or factors is not None or attention is not None
        if not is_product and _may_be_made_of_others(function, args):
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
        self._note_bias(function, args, kwargs, result)
        if attention is not None:
            self._add(self._joined(attention, *args[:2]), seconds)
        if factors is not None:
            self._add_product(*factors, result, seconds)
        elif is_convolution:
            self._add_convolution(args, result, seconds)
        elif function is PRODUCT_OF_4_BITS:
            self._add_product_of_4_bits(args, result, seconds)
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

    def _joined(self, kind: Kind, q: Any, k: Any) -> Kind:  # noqa: ANN401 - tensors
        """Return attention as kernels compute it: heads of one query that share keys are rows."""
        repeats = self._repeats.get(k, q.shape[1] // max(1, k.shape[1]))
        if kind.m != 1 or repeats < 2 or kind.scores.endswith("causal"):
            return kind
        return replace(kind, m=repeats, batch=kind.batch // repeats)

    def _note_bias(
        self,
        function: Any,  # noqa: ANN401 - an operator
        args: tuple[Any, ...],
        keywords: Mapping[str, Any] | None,
        result: Any,  # noqa: ANN401 - a tensor
    ) -> None:
        """Note what is added to the columns of the last sums, which may be scaled before."""
        last = self._sum
        if last is not None and last.y.dim() == IMAGE_DIMENSIONS:
            self._note_normalised(function, args, last)
            return
        read = [place for place, one in enumerate(args) if last and _shares_memory(one, last.y)]
        if last is None or not read or function in SHOWS:
            return
        self._sum = None
        if len(args) != _TWO or read not in ([0], [1]) or keywords:
            return
        y, other = args if read == [0] else reversed(args)
        is_whole = y.is_contiguous() and y.shape[-1:] == (last.kind.n,)
        is_vector = isinstance(other, torch.Tensor) and other.shape == (last.kind.n,)
        if not is_whole or not is_vector or y.numel() != last.y.numel():
            return
        if function in _MULTIPLIES and last.kind.w_layout == WEIGHT_ONLY_LAYOUT:
            self._sum = replace(last, y=result)
        elif function in _ADDS and self._names.of(other) is not None:
            self._remove(last)
            self._add(replace(last.kind, has_bias=True), last.seconds, last.name)

    def _note_normalised(self, function: Any, args: tuple[Any, ...], last: _Sum) -> None:  # noqa: ANN401
        """Note what scales and shifts the channels of a convolution: Inductor makes it a bias."""
        if not any(_shares_memory(one, last.y) for one in args):
            return
        self._sum = None
        of_model = all(one is None or self._names.of(one) is not None for one in args[1:5])
        if function is _NORMALISES and of_model and not last.is_normalised:
            self._sum = replace(last, kind=replace(last.kind, has_bias=True), is_normalised=True)
            self._remove(last)
            self._add(self._sum.kind, last.seconds, last.name)
        elif last.is_normalised:  # read by another too, so that nothing is folded
            self._remove(last)
            self._add(replace(last.kind, has_bias=False), last.seconds, last.name)

    def _remove(self, one: _Sum) -> None:
        """Take back what was added."""
        seen = self.seen[one.kind]
        seen.calls -= 1
        seen.seconds -= one.seconds
        if one.name is not None:
            seen.weights[one.name] -= 1
            if not seen.weights[one.name]:
                del seen.weights[one.name]
        if not seen.calls:
            del self.seen[one.kind]

    def _add_product(self, x: Any, w: Any, bias: Any, y: Any, seconds: float) -> None:  # noqa: ANN401
        name = self._names.of(w)
        batch, m = x.shape[0] if x.dim() == 3 else 1, x.shape[-2]
        if name is not None and batch > 1 and w.stride(0) == 0:  # one w, as of a layer
            batch, m = 1, batch * m
        kind = Kind(
            batch=batch,
            m=m,
            n=w.shape[-1],
            k=x.shape[-1],
            dtype=self._types_of(x, w),
            has_bias=bias is not None,
            w_layout=self._layout_of(w) if name is None else self._w_layout(x, w),
        )
        self._add(kind, seconds, name)
        is_plain = name is not None and bias is None
        self._sum = _Sum(y, kind, seconds, name) if is_plain else None

    def _add_convolution(self, args: tuple[Any, ...], y: Any, seconds: float) -> None:  # noqa: ANN401
        """Add a convolution that `enable` takes as a product of its patches."""
        x, w, bias, *_how = args
        name, found = self._names.of(w), convolution_of(args, (x, w, y))
        if name is None or found is None or found.why_left or x.dtype not in TYPES:
            return
        m, n, k = found.sizes
        kind = Kind(
            batch=1,
            m=m,
            n=n,
            k=k,
            dtype=_type_of(x),
            has_bias=bias is not None,
            w_layout=WeightLayout.NK.value,
        )
        self._add(kind, seconds, name)
        self._sum = _Sum(y, kind, seconds, name) if bias is None else None

    def _add_product_of_4_bits(self, args: tuple[Any, ...], y: Any, seconds: float) -> None:  # noqa: ANN401
        x, packed, group, _groups = args
        floats, name = _type_of(x), self._names.of(packed)
        kind = Kind(
            batch=1,
            m=x.shape[0],
            n=y.shape[1],
            k=x.shape[1],
            dtype=f"{floats}_u4_f32_{floats}",
            has_bias=False,
            w_layout=f"nk:g{group}",
        )
        self._add(kind, seconds, name)
        self._sum = None if name is None else _Sum(y, kind, seconds, name)

    def _add(self, kind: Kind, seconds: float, name: str | None = None) -> None:
        seen = self.seen.setdefault(kind, Seen())
        seen.calls += 1
        seen.seconds += seconds
        if name is not None:
            seen.weights[name] += 1

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


def _may_be_made_of_others(function: Any, args: tuple[Any, ...]) -> bool:  # noqa: ANN401
    return (
        isinstance(function, OpOverload)
        and function not in _SIMPLE
        and not any(isinstance(one, torch.Tensor) and one.is_nested for one in args)
    )


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
) -> Kind | None:
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
    return Kind(
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


def _shares_memory(one: Any, other: Any) -> bool:  # noqa: ANN401 - tensors, or anything
    """Return whether a value is a tensor that shows the memory of another."""
    return (
        isinstance(one, torch.Tensor)
        and address_of(one) is not None
        and address_of(one) == address_of(other)
    )
