"""Weights that freezing made constants of what was compiled: a warning where they change later."""

import ctypes
import logging
from collections.abc import Callable, Collection, Mapping
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch._compile import _disable_dynamo
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from gemm_tuner.torch.operators import library

_LOG = logging.getLogger(__name__)
_TELLING = Lock()


class FrozenWeights:
    """The weights of one compiled graph as they were then, by name. It keeps none of them alive."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        """Remember the versions and addresses of tensors."""
        native = _native()
        self._names = tuple(weights)
        self._known = native.gemm_tuner_know_weights(_addresses(weights.values()), len(weights))
        finalize(self, native.gemm_tuner_forget_weights, self._known)
        self._changed = native.gemm_tuner_changed_weight
        self.is_told = False
        with _TELLING:
            _LIVE.add(self)

    @property
    def is_changed(self) -> bool:
        """Return whether a weight was written in place, or its data are elsewhere."""
        return bool(self._changed(self._known) >= 0)

    def note_written(self, addresses: "ctypes.Array[ctypes.c_void_p]") -> None:
        """Let those of the weights be changed that are among tensors."""
        _native().gemm_tuner_note_written(self._known, addresses, len(addresses))

    def checked(self, function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a compiled function that looks at its weights first: 0.4 µs for 100 of them."""
        changed, known = self._changed, self._known

        def call(args: list[Any]) -> Any:  # noqa: ANN401 - what it returns
            if not self.is_told and (place := changed(known)) >= 0:
                _tell(self._names[place])
            return function(args)

        call._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001 - it empties `args`
        return call


def _addresses(tensors: Collection[Any]) -> "ctypes.Array[ctypes.c_void_p]":
    """Return where PyTorch keeps what it knows of tensors."""
    places = [one._cdata for one in tensors]  # noqa: SLF001 - it has no public name
    return (ctypes.c_void_p * len(places))(*places)


def _tell(name: str) -> None:
    """Warn of a weight, once for all graphs whose weights have changed by now."""
    with _TELLING:
        changed = [one for one in _LIVE if not one.is_told and one.is_changed]
        for one in changed:
            one.is_told = True
    if changed:
        _LOG.warning(
            "%s was changed after the model was compiled, and what was compiled computes with the "
            "weights that it had then. Call torch._dynamo.reset() after a change of weights, so "
            "that the next call compiles the model again.",
            name,
        )


_LIVE: WeakSet[FrozenWeights] = WeakSet()


@cache
def follow_frozen_weights(is_on: Callable[[], bool]) -> None:
    """Let what Inductor compiles with freezing look at its weights, where `is_on` says so then.

    What is compiled ahead of time has weights of its own, and does not look.
    """
    from torch._inductor import compile_fx  # noqa: PLC0415 - it imports the compiler, for seconds

    freeze = compile_fx.fw_compiler_freezing

    def fw_compiler_freezing(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - of PyTorch
        context = torch._guards.TracingContext.try_get()  # noqa: SLF001 - as freezing itself does
        if context is None or V.aot_compilation or not is_on():
            return freeze(*arguments, **keywords)
        before = list(context.params_flat_unwrap_subclasses or ())
        compiled = freeze(*arguments, **keywords)
        after = context.params_flat_unwrap_subclasses or ()
        frozen = [one for one, kept in zip(before, after, strict=True) if kept is None]
        weights = _named(frozen, keywords.get("dynamo_model"))
        return FrozenWeights(weights).checked(compiled) if weights else compiled

    compile_fx.fw_compiler_freezing = fw_compiler_freezing
    register_optimizer_step_post_hook(_disable_dynamo(_note_step))


def _note_step(optimizer: Any, _arguments: object, _keywords: object) -> None:  # noqa: ANN401
    """Note what an optimizer has written: the fused ones write without raising versions."""
    written = _addresses([one for group in optimizer.param_groups for one in group["params"]])
    with _TELLING:
        for one in _LIVE:
            one.note_written(written)


def _named(weights: list[Any], graph: Any) -> dict[str, Any]:  # noqa: ANN401 - a module of a graph
    """Return weights by the names that they have in the model, as far as these are known."""
    paths = getattr(graph, "meta", {}).get("dynamo_flat_name_to_original_fqn", {})
    names: dict[int, str] = {}
    if isinstance(graph, torch.nn.Module):
        for flat, one in (*graph.named_parameters(), *graph.named_buffers()):
            names.setdefault(id(one), paths.get(flat, flat))
    return {
        names.get(id(one), f"a weight ({'x'.join(map(str, one.shape))}, {place})"): one
        for place, one in enumerate(weights)
        if isinstance(one, torch.Tensor) and not isinstance(one, FakeTensor)
    }


@cache
def _native() -> ctypes.PyDLL:
    """Return the operators' functions for weights, which are called under the lock of Python."""
    native = ctypes.PyDLL(library()._name)  # noqa: SLF001 - it has no public name
    native.gemm_tuner_know_weights.restype = ctypes.c_void_p
    native.gemm_tuner_know_weights.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int64)
    native.gemm_tuner_changed_weight.restype = ctypes.c_int64
    native.gemm_tuner_changed_weight.argtypes = (ctypes.c_void_p,)
    native.gemm_tuner_note_written.restype = None
    native.gemm_tuner_note_written.argtypes = (
        ctypes.c_void_p,
        *native.gemm_tuner_know_weights.argtypes,
    )
    native.gemm_tuner_forget_weights.restype = None
    native.gemm_tuner_forget_weights.argtypes = (ctypes.c_void_p,)
    return native
