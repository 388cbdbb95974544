"""The products and attention that modules of a model compute themselves in eager mode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import getattr_static
from threading import get_ident
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.layers.wanted import WantedGroups, WantedProduct
from gemm_tuner.torch.asking import libraries_of_pytorch, problem_text, rows_up_to
from gemm_tuner.torch.calls import compiled_in, is_compiled
from gemm_tuner.torch.eager.model_layers import ModelLayer, OtherLayer
from gemm_tuner.torch.eager.tuned_linear import is_transformed
from gemm_tuner.torch.eager.tuned_products import (
    ATTENTION,
    GROUPED,
    PRODUCTS,
    TunedProducts,
    groups_of,
)
from gemm_tuner.torch.operators import TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProducts:
    """A module whose `forward` computes products of two activations, of groups, or attention.

    `wanted` are the products that kernels may compute, each with how many there are in a call.
    `looks` is how many functions of PyTorch a call of the module makes: each takes longer where
    its products are looked for.
    """

    name: str
    module: Any
    wanted: tuple[WantedProduct, ...]
    batches: tuple[int, ...]
    looks: float
    why_left: str | None = None

    @property
    def problem(self) -> str:
        """Return what it computes, in words such as `12 of attention f32 128x128x64 scale`."""
        parts = zip(self.wanted, self.batches, strict=True)
        return ", ".join(problem_text(one, batch) for one, batch in parts)


def without_seen(
    layers: Sequence[ModelLayer], products: Sequence[ModelProducts]
) -> list[ModelLayer]:
    """Return the layers of a model but experts whose products were seen."""
    seen = {id(one.module) for one in products}
    return [one for one in layers if not (isinstance(one, OtherLayer) and id(one.module) in seen)]


@dataclass(slots=True)
class _Seen:
    """The products of a module, by all but their rows: these, and how many there are."""

    batches: dict[WantedProduct, int] = field(default_factory=dict)
    rows: dict[WantedProduct, set[int]] = field(default_factory=dict)
    looks: int = 0
    calls: int = 0

    def add(self, wanted: WantedProduct, rows: int, batch: int) -> None:
        self.rows.setdefault(wanted, set()).add(rows)
        self.batches[wanted] = max(batch, self.batches.get(wanted, 0))


def _products_of(name: str, module: Any, seen: _Seen) -> ModelProducts:  # noqa: ANN401 - a module
    return ModelProducts(
        name=name,
        module=module,
        wanted=tuple(replace(one, rows=_asked(one, rows)) for one, rows in seen.rows.items()),
        batches=tuple(seen.batches[one] for one in seen.rows),
        looks=seen.looks / seen.calls,
        why_left=_why_not_wrapped(module),
    )


def _asked(wanted: WantedProduct, seen: set[int]) -> tuple[int | str, ...]:
    """Return the numbers of rows to ask for: each call has groups of other sizes."""
    return rows_up_to(max(seen)) if isinstance(wanted, WantedGroups) else tuple(sorted(seen))


def _why_not_wrapped(module: Any) -> str | None:  # noqa: ANN401 - a module
    """Return why no `forward` can be put around a module's own, None if it can."""
    own = vars(module).get("forward")
    if own is not None and not isinstance(own, TunedProducts):
        return "its forward was replaced by another function"
    if isinstance(getattr_static(type(module), "forward"), staticmethod | classmethod):
        return "its forward is no method of the module"
    return None


class Seeing(TorchFunctionMode):  # type: ignore[misc]  # without PyTorch, it is Any
    """Notes which products the modules of a model compute themselves.

    Of what PyTorch's own modules compute in one operator, and of compiled modules, nothing is seen.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - a module
        """Take the model."""
        super().__init__()
        compiled = compiled_in(model)
        self._modules = [
            (name, one)
            for name, one in model.named_modules()
            if id(one) not in compiled and not isinstance(one, torch.jit.ScriptModule)
        ]
        self._compiled = [one for one in model.modules() if is_compiled(one)]
        self._seen: dict[int, _Seen] = {}
        self._inside: list[int] = []

    @property
    def found(self) -> list[ModelProducts]:
        """Return the modules that did."""
        return [
            _products_of(name, one, self._seen[id(one)])
            for name, one in self._modules
            if id(one) in self._seen and self._seen[id(one)].rows
        ]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Look at what this thread calls.

        Each module gets a `forward` around its own for as long. Hooks would change what modules
        with a fast path call, and compiled modules. These are called as if nobody looked.
        """
        with ExitStack() as exits:
            for _name, module in self._modules:
                forward = self._watched(module, get_ident())
                exits.enter_context(_attribute(module, "forward", forward))
            for module in self._compiled:
                in_place = vars(module).get("_compiled_call_impl")
                name = "forward" if in_place is None else "_compiled_call_impl"
                exits.enter_context(_attribute(module, name, self._unwatched(module, name)))
            with self:
                yield

    def _watched(self, module: Any, thread: int) -> Callable[..., Any]:  # noqa: ANN401 - a module
        """Return a `forward` that notes that a module runs, if this thread calls it."""
        own = vars(module).get("forward")

        @wraps(module.forward, updated=())
        def forward(*inputs: Any, **keywords: Any) -> Any:  # noqa: ANN401 - of the user
            # The class is looked at now: a lazy module gets another at its first call.
            call = own or getattr_static(type(module), "forward").__get__(module, type(module))
            if torch.compiler.is_compiling() or get_ident() != thread:
                return call(*inputs, **keywords)
            self._inside.append(id(module))
            self._seen.setdefault(id(module), _Seen()).calls += 1
            try:
                return call(*inputs, **keywords)
            finally:
                self._inside.pop()

        return forward

    def _unwatched(self, module: Any, name: str) -> Callable[..., Any]:  # noqa: ANN401 - a module
        """Return what calls a compiled module without this mode, for which it would compile anew.

        `name` is that of the attribute which is compiled.
        """
        compiled = getattr(module, name)

        @wraps(compiled, updated=())
        def call(*inputs: Any, **keywords: Any) -> Any:  # noqa: ANN401 - of the user
            if torch.overrides._get_current_function_mode() is not self:  # noqa: SLF001 - no other
                return compiled(*inputs, **keywords)
            with torch.overrides._pop_mode_temporarily():  # noqa: SLF001 - no other
                return compiled(*inputs, **keywords)

        return call

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401 - a function of PyTorch
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what it returns
        given = kwargs or {}
        if torch.compiler.is_compiling():  # a function that the model calls is compiled
            return function(*args, **given)
        for one in set(self._inside):
            self._seen[one].looks += 1
        if self._inside and not types:
            self._note(function, args, given)
        return function(*args, **given)

    def _note(self, function: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:  # noqa: ANN401
        seen = self._seen[self._inside[-1]]
        found = None
        if function is ATTENTION:
            found = _attention_of(*args, **given)
        elif function in PRODUCTS and len(args) == 2 and not given:
            found = _product_of(*args)
        elif function is GROUPED and (groups := groups_of(*args, **given)) is not None:
            for one in _groups_in(*groups):
                seen.add(*one)
        if found is not None:
            seen.add(*found)


@contextmanager
def _attribute(module: Any, name: str, value: object) -> Iterator[None]:  # noqa: ANN401
    """Give a module an attribute for as long as a `with` block runs."""
    own = vars(module)
    before = own.get(name)
    own[name] = value
    try:
        yield
    finally:
        own.pop(name, None)
        if before is not None:
            own[name] = before


def _attention_of(  # noqa: PLR0917 - as in PyTorch
    query: Any,  # noqa: ANN401 - a tensor
    key: Any,  # noqa: ANN401 - a tensor
    value: Any,  # noqa: ANN401 - a tensor
    attn_mask: Any = None,  # noqa: ANN401 - a tensor
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - as in PyTorch
    **_how: object,
) -> tuple[WantedProduct, int, int] | None:
    """Return the attention of a call, how many rows and heads; None if no kernel is for such."""
    if not (query.dim() == key.dim() == 4 and key.shape == value.shape and not dropout_p):
        return None
    rows, keys = query.shape[2], key.shape[2]
    if is_causal and rows != keys:
        return None
    mask = [] if attn_mask is None else ["add"]
    heads, shared = query.shape[1], key.shape[1]
    if rows == 1 and heads > shared > 0 and not is_causal:
        heads, rows = shared, heads // shared  # they are rows of one product
    return _wanted(
        (query, key, value),
        operation=Operation.ATTENTION,
        sizes=(rows, keys, query.shape[3]),
        batch=query.shape[0] * heads,
        epilogue="+".join(["scale", *mask, *(["causal"] if is_causal else [])]),
    )


def _product_of(x: Any, w: Any) -> tuple[WantedProduct, int, int] | None:  # noqa: ANN401 - tensors
    """Return the product of a call, how many rows and products; None if no kernel is for such."""
    if x.dim() < 3 or w.dim() < 2:  # others are rather of weights
        return None
    return _wanted(
        (x, w),
        operation=Operation.MATMUL,
        sizes=(x.shape[-2], w.shape[-1], x.shape[-1]),
        batch=x.shape[:-2].numel(),
        layout=_layout_of(w),
    )


def _groups_in(x: Any, w: Any, ends: Any) -> list[tuple[WantedProduct, int, int]]:  # noqa: ANN401
    """Return the products of groups of rows, each with how many rows and groups there are."""
    if type(ends) is not torch.Tensor or not ends.is_cpu or is_transformed():  # it has no numbers
        return []
    if (x.dim(), w.dim(), ends.dim()) != (2, 3, 1):
        return []
    sizes = ends.diff(prepend=ends.new_zeros(1))
    rows = sizes[sizes > 0].tolist()
    found = [
        _wanted(
            (x, w.detach()),  # it may be a parameter
            operation=Operation.MATMUL,
            sizes=(one, w.shape[-1], w.shape[-2]),
            batch=len(rows),
            layout=_layout_of(w),
            kind=WantedGroups,
        )
        for one in set(rows)
    ]
    return [one for one in found if one is not None]


def _layout_of(w: Any) -> WeightLayout:  # noqa: ANN401 - a tensor
    """Return how w (..., k, n) lies."""
    has_columns = w.stride(-1) != 1 and w.stride(-2) == 1
    return WeightLayout.NK if has_columns else WeightLayout.KN


def _wanted(
    arrays: Sequence[Any],
    *,
    operation: Operation,
    sizes: tuple[int, int, int],
    batch: int,
    epilogue: str = "none",
    layout: WeightLayout = WeightLayout.NK,
    kind: type[WantedProduct] = WantedProduct,
) -> tuple[WantedProduct, int, int] | None:
    dtype = arrays[0].dtype
    is_plain = all(
        type(one) is torch.Tensor and one.is_cpu and one.dtype == dtype for one in arrays
    )
    rows, n, k = sizes
    if not is_plain or dtype not in TYPES or not (batch and rows and n and k):
        return None
    threads = torch.get_num_threads()
    wanted = kind(
        n=n,
        k=k,
        rows=(),
        dtype=TYPES[dtype],
        epilogue=epilogue,
        threads=threads if kind is WantedGroups or batch < threads else 1,
        w_layout=layout.value,
        operation=operation.value,
        beside=libraries_of_pytorch(TYPES[dtype]),
    )
    return wanted, rows, batch
