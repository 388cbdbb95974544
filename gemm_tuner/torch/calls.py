"""How a model is called: as its user's examples say, or as a script did."""

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, Self

import torch
from torch.utils import _pytree

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.torch.linear_modules import is_linear

_MOST_MODELS = 16
_MOST_CALLS = 8  # of one model, that differ in shapes


class NotRepeated(Exception):
    """A call that a script made failed when it was made again; `key` is the call's."""

    def __init__(self, key: object, error: Exception) -> None:
        """Take the key of the call, and what it raised."""
        super().__init__(f"{type(error).__name__}: {_first_line(error)}")
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What was switched on around a call, besides gradients."""

    is_inference: bool = False
    autocast: Any = None  # a type, None where it is off

    @classmethod
    def now(cls) -> Self:
        """Return what is on in this thread."""
        is_on = torch.is_autocast_enabled("cpu")
        return cls(
            is_inference=torch.is_inference_mode_enabled(),
            autocast=torch.get_autocast_dtype("cpu") if is_on else None,
        )

    @contextmanager
    def on(self) -> Iterator[None]:
        """Switch the same on, and gradients off."""
        cast = torch.autocast("cpu", dtype=self.autocast, enabled=self.autocast is not None)
        # Not inference_mode(False), which switches gradients on.
        with cast, torch.inference_mode() if self.is_inference else torch.no_grad():
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of one call of a model, and how often it is made.

    `mode` and `key` are those of a call that a script made; other calls have None.
    """

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    mode: Mode | None = None
    key: object = None

    @classmethod
    def of(cls, inputs: Any) -> Self:  # noqa: ANN401 - of PyTorch
        """Return the call that example inputs mean: a tensor, a tuple, or a dict of keywords."""
        if isinstance(inputs, Mapping):
            return cls(arguments=(), keywords=inputs)
        return cls(arguments=inputs if isinstance(inputs, tuple) else (inputs,))

    @property
    def text(self) -> str:
        """Return the shapes of its tensors, in words such as `8x64, 8x1`."""
        leaves = _pytree.tree_leaves((self.arguments, dict(self.keywords)))
        shapes = ["x".join(map(str, one.shape)) for one in leaves if isinstance(one, torch.Tensor)]
        return ", ".join(shapes) or "no tensors"

    @property
    def is_cast(self) -> bool:
        """Return whether the call is made under autocast."""
        return (self.mode or Mode.now()).autocast is not None

    def copied(self) -> "Call":
        """Return it with arguments of its own, which the model may change, such as a cache.

        Raises:
            InvalidSetting: they cannot be copied.
        """
        given = _pytree.tree_map(_detached, (self.arguments, dict(self.keywords)))
        try:
            arguments, keywords = copy.deepcopy(given)
        except Exception as error:
            raise InvalidSetting(
                f"the inputs of the model cannot be copied ({type(error).__name__}: "
                f"{_first_line(error)}); give tensors, or objects that copy.deepcopy copies."
            ) from error
        return replace(self, arguments=arguments, keywords=keywords)

    def on(self, model: Any) -> Any:  # noqa: ANN401 - a module
        """Call a model, and return what it returns.

        Raises:
            NotRepeated: a script made this call, and it fails now.
        """
        if self.mode is None:
            return model(*self.arguments, **self.keywords)
        try:
            with self.mode.on():
                return model(*self.arguments, **self.keywords)
        except Exception as error:
            raise NotRepeated(self.key, error) from error


def calls_of(example_inputs: Any) -> list[Call]:  # noqa: ANN401 - tensors
    """Return the calls that `example_inputs` mean: one, or a list of them.

    Raises:
        InvalidSetting: they are None, or an iterator.
    """
    inputs = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    for one in inputs:
        if one is None or isinstance(one, Iterator):
            raise InvalidSetting(
                f"example inputs are of type {type(one).__name__}; give a tensor, a tuple, a dict "
                "of keyword arguments, or a list of these."
            )
    return [Call.of(one) for one in inputs]


@dataclass(slots=True, kw_only=True)
class CalledModel:
    """A module that no other calls, and its calls: those alike in all shapes are one.

    Calls that are not kept are counted: those whose arguments cannot be copied are `left_out`,
    those that failed in the script `failed`, and those of further kinds `dropped`.
    """

    module: Any
    name: str
    calls: dict[object, Call] = field(default_factory=dict)
    left_out: int = 0
    failed: int = 0
    dropped: int = 0


class Capturing:
    """Keeps how this thread calls the outermost modules with linear layers in a `with` block.

    Of calls whose tensors are alike in shape and type, the first is kept, with their count. What
    is compiled is not kept: `compiled` has the names of such models. `dropped` is how many models
    there were besides those that are kept.
    """

    def __init__(self) -> None:
        self.models: dict[int, CalledModel] = {}
        self.compiled: dict[str, None] = {}
        self._dropped: set[int] = set()
        self._exits = ExitStack()
        self._thread = get_ident()
        self._is_inside = False

    @property
    def dropped(self) -> int:
        """Return how many models were called besides those that are kept."""
        return len(self._dropped)

    def __enter__(self) -> Self:
        """Begin."""
        call_module = torch.nn.Module.__call__

        def call(module: Any, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            if self._is_inside or torch.compiler.is_compiling() or get_ident() != self._thread:
                return call_module(module, *arguments, **keywords)
            model = self._model(module)
            kept = None if model is None else _kept(model, arguments, keywords)
            self._is_inside = True
            try:
                result = call_module(module, *arguments, **keywords)
            except BaseException:
                if model is not None:
                    model.failed += 1
                raise
            finally:
                self._is_inside = False
            if model is not None and kept is not None:
                known = model.calls.get(kept.key)
                model.calls[kept.key] = replace(known, count=known.count + 1) if known else kept
            return result

        torch.nn.Module.__call__ = call
        self._exits.callback(setattr, torch.nn.Module, "__call__", call_module)
        return self

    def __exit__(self, *_error: object) -> None:
        """End."""
        self._exits.close()

    def _model(self, module: Any) -> CalledModel | None:  # noqa: ANN401 - a module
        """Return what is kept of a module, None if nothing is."""
        if is_compiled(module):
            own = getattr(module, "_orig_mod", module)
            self.compiled[type(own).__name__] = None
            return None
        if id(module) not in self.models:
            if not any(map(is_linear, module.modules())):
                return None
            if len(self.models) == _MOST_MODELS:
                self._dropped.add(id(module))
                return None
            name = type(module).__name__
            self.models[id(module)] = CalledModel(module=module, name=name)
        return self.models[id(module)]


def is_compiled(module: Any) -> bool:  # noqa: ANN401 - a module
    """Return whether torch.compile compiled a module.

    `torch.compile(module)` made it, `module.compile()` changed it, or its `forward` is a compiled
    function.
    """
    # What makes compiled modules takes seconds to import, and is imported where there are any.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo and isinstance(module, dynamo.OptimizedModule):
        return not isinstance(module.dynamo_ctx, dynamo.DisableContext)
    in_place = getattr(module, "_compiled_call_impl", None)
    return in_place is not None or hasattr(module.forward, "get_compiler_config")


def compiled_in(model: Any) -> frozenset[int]:  # noqa: ANN401 - a module
    """Return the `id` of each module of a model that is compiled, and of all modules in these."""
    compiled = [one for one in model.modules() if is_compiled(one)]
    return frozenset(id(inner) for one in compiled for inner in one.modules())


def _kept(model: CalledModel, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call | None:
    """Return a call of a model as it is before it is made, None if it is not kept."""
    mode = Mode.now()
    key = (_shape_of((arguments, keywords)), mode)
    if key in model.calls:
        return model.calls[key]
    if len(model.calls) == _MOST_CALLS:
        model.dropped += 1
        return None
    try:
        return Call(arguments=arguments, keywords=keywords, mode=mode, key=key).copied()
    except InvalidSetting:  # the user's own objects; it is not called again
        model.left_out += 1
        return None


def _detached(leaf: Any) -> Any:  # noqa: ANN401 - anything
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _first_line(error: Exception) -> str:
    """Return the first line of what PyTorch says in many."""
    return next(iter(str(error).splitlines()), "")


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
