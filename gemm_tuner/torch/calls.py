"""How a model is called: as its user's examples say, or as a script did."""

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import get_ident
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils import _pytree

_COMPILED = torch._dynamo.eval_frame.OptimizedModule  # noqa: SLF001 - it has no public name
_MOST_MODELS = 16
_MOST_CALLS = 8  # of one model, that differ in shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of one call of a model, and how often it is made."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1

    @classmethod
    def of(cls, inputs: Any) -> Self:  # noqa: ANN401 - of PyTorch
        """Return the call that example inputs mean: a tensor, a tuple, or a dict of keywords."""
        if isinstance(inputs, Mapping):
            return cls(arguments=(), keywords=inputs)
        return cls(arguments=inputs if isinstance(inputs, tuple) else (inputs,))

    def copied(self) -> "Call":
        """Return it with arguments of its own, which the model may change, such as a cache."""
        arguments, keywords = copy.deepcopy((self.arguments, dict(self.keywords)))
        return replace(self, arguments=arguments, keywords=keywords)

    def on(self, model: Any) -> Any:  # noqa: ANN401 - a module
        """Call a model, and return what it returns."""
        return model(*self.arguments, **self.keywords)


def calls_of(example_inputs: Any) -> list[Call]:  # noqa: ANN401 - tensors
    """Return the calls that `example_inputs` mean: one, or a list of them."""
    inputs = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    return [Call.of(one) for one in inputs]


@dataclass(slots=True, kw_only=True)
class CalledModel:
    """A module that no other calls, and its calls: those alike in all shapes are one.

    `left_out` is how many calls were not kept, because their arguments cannot be copied.
    """

    module: Any
    calls: dict[object, Call] = field(default_factory=dict)
    left_out: int = 0


class Capturing:
    """Keeps how this thread calls the outermost modules in a `with` block.

    Of calls whose tensors are alike in shape and type, the first is kept, with their count. What
    is compiled is left out.
    """

    def __init__(self) -> None:
        self.models: dict[int, CalledModel] = {}
        self._exits = ExitStack()
        self._thread = get_ident()
        self._is_inside = False

    def __enter__(self) -> Self:
        """Begin."""
        call_module = torch.nn.Module.__call__

        def call(module: Any, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            if self._is_inside or torch.compiler.is_compiling() or get_ident() != self._thread:
                return call_module(module, *arguments, **keywords)
            if not isinstance(module, _COMPILED):
                self._keep(module, arguments, keywords)
            self._is_inside = True
            try:
                return call_module(module, *arguments, **keywords)
            finally:
                self._is_inside = False

        torch.nn.Module.__call__ = call
        self._exits.callback(setattr, torch.nn.Module, "__call__", call_module)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End."""
        self._exits.close()

    def _keep(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:  # noqa: ANN401
        if id(module) not in self.models and len(self.models) == _MOST_MODELS:
            return
        model = self.models.setdefault(id(module), CalledModel(module=module))
        alike = _shape_of((arguments, keywords))
        if alike in model.calls:
            known = model.calls[alike]
            model.calls[alike] = replace(known, count=known.count + 1)
        elif len(model.calls) < _MOST_CALLS:
            kept = _pytree.tree_map(_detached, (arguments, keywords))
            try:
                model.calls[alike] = Call(arguments=kept[0], keywords=kept[1]).copied()
            except Exception:  # noqa: BLE001 - the user's own objects; it is not called again
                model.left_out += 1


def _detached(leaf: Any) -> Any:  # noqa: ANN401 - anything
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _shape_of(arguments: object) -> object:
    """Return what tells calls apart: types and shapes of tensors, and the plain values."""
    leaves, structure = _pytree.tree_flatten(arguments)
    shapes = tuple(
        (str(leaf.dtype), tuple(leaf.shape))
        if isinstance(leaf, torch.Tensor)
        else (type(leaf).__name__, leaf if isinstance(leaf, int | float | str) else None)
        for leaf in leaves
    )
    return shapes, str(structure)
