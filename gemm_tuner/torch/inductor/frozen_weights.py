"""Weights that freezing made constants of what was compiled, and what runs where they change."""

import ctypes
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from threading import Lock
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch._compile import _disable_dynamo
from torch._functorch.aot_autograd import MutationType
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from gemm_tuner.torch.inductor.graphs import ATEN
from gemm_tuner.torch.operators import library

_LOG = logging.getLogger(__name__)
_TELLING = Lock()


class FrozenWeights:
    """The weights of one compiled graph as they were then, by name. It keeps none of them alive."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        """Remember the versions of tensors, and where their elements lie."""
        native = _native()
        self._names = tuple(weights)
        self._weights = [TensorWeakRef(one) for one in weights.values()]
        self._known = native.gemm_tuner_know_weights(_addresses(weights.values()), len(weights))
        finalize(self, native.gemm_tuner_forget_weights, self._known)
        self._changed = native.gemm_tuner_changed_weight
        self.is_told = False
        with _TELLING:
            _LIVE.add(self)

    @property
    def is_changed(self) -> bool:
        """Return whether a weight was written in place, or its elements lie elsewhere."""
        return bool(self._changed(self._known, 0) >= 0)

    def note_written(self, addresses: "ctypes.Array[ctypes.c_void_p]") -> None:
        """Let those of the weights be changed that lie where tensors do."""
        _native().gemm_tuner_note_written(self._known, addresses, len(addresses))

    def note_told(self) -> None:
        """Let no one be told of this again, and its buffers that changed be no constants again."""
        self.is_told = True
        place = -1
        while (place := self._changed(self._known, place + 1)) >= 0:
            note_varying([self._weights[place]()])

    def checked(
        self, compiled: Callable[[list[Any]], Any], plain: "PlainGraph"
    ) -> Callable[[list[Any]], Any]:
        """Return a compiled function that looks at its weights first: 1 µs for 100 of them.

        Where one has changed, the plain graph computes with the weights as they are.
        """
        changed, known = self._changed, self._known

        def call(args: list[Any]) -> Any:  # noqa: ANN401 - what it returns
            place = changed(known, 0)
            if place < 0:
                return compiled(args)
            if not self.is_told:
                _tell(self._names[place])
            return plain(args)

        call._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001 - it empties `args`
        return call


class PlainGraph:
    """A graph as it was before its weights became constants. PyTorch runs it step by step."""

    def __init__(self, module: GraphModule) -> None:
        """Copy the graph of a module, whose weights come first among its arguments."""
        graph = Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        for node in graph.nodes:
            node.meta = {}
        self._module = GraphModule(module, graph)
        self._weights: list[list[TensorWeakRef | None]] = []

    def leave_out(self, weights: Sequence[Any], owners: Sequence[int]) -> None:
        """Let calls come without those of the weights that are not None.

        `owners` has a number for each: several of one are the parts of a tensor's subclass.
        """
        parts: dict[int, list[TensorWeakRef | None]] = {}
        for one, owner in zip(weights, owners, strict=True):
            parts.setdefault(owner, []).append(None if one is None else TensorWeakRef(one))
        self._weights = list(parts.values())

    def __call__(self, args: list[Any]) -> Any:  # noqa: ANN401 - what the graph returns
        """Compute with the weights as they are.

        Raises:
            RuntimeError: one is gone.
        """
        given: list[Any] = []
        rest = iter(args)
        for parts in self._weights:
            if None not in parts:
                next(rest)  # of a weight that is left out as a whole, there is None
                given.extend(map(_live, parts))
            else:
                given.extend(
                    one if part is None else _live(part)
                    for part, one in zip(parts, rest, strict=False)
                )
        given.extend(rest)
        args.clear()
        return self._module(*given)


def _live(weight: Any) -> Any:  # noqa: ANN401 - what refers to a tensor, a tensor
    found = weight()
    if found is None:
        raise RuntimeError(
            "gemm-tuner: weights of a compiled model have changed, and others are gone; call "
            "torch._dynamo.reset()."
        )
    return found


def _addresses(tensors: Collection[Any]) -> "ctypes.Array[ctypes.c_void_p]":
    """Return where PyTorch keeps what it knows of tensors."""
    places = [one._cdata for one in tensors]  # noqa: SLF001 - it has no public name
    return (ctypes.c_void_p * len(places))(*places)


def _tell(name: str) -> None:
    """Warn of a weight, once for all graphs whose weights have changed by now."""
    with _TELLING:
        changed = [one for one in _LIVE if not one.is_told and one.is_changed]
        for one in changed:
            one.note_told()
    if changed:
        _LOG.warning(
            "%s was changed after the model was compiled, so it runs without what was compiled: "
            "right, but slower. Call torch._dynamo.reset() after a change of weights, so that the "
            "next call compiles the model again.",
            name,
        )


_LIVE: WeakSet[FrozenWeights] = WeakSet()
# Buffers that change.
_VARYING = WeakIdKeyDictionary()


def note_varying(tensors: Iterable[Any]) -> None:
    """Let buffers be no constants of what is compiled from now on."""
    for one in tensors:
        if isinstance(one, torch.Tensor) and not isinstance(one, torch.nn.Parameter):
            _VARYING[one] = True


@cache
def follow_frozen_weights(is_on: Callable[[], bool]) -> None:
    """Let what Inductor compiles with freezing look at its weights, where `is_on` says so then.

    What is compiled ahead of time has weights of its own, and does not look. A buffer that a graph
    writes is a constant of no other.
    """
    from torch._inductor import compile_fx, freezing  # noqa: PLC0415 - the compiler, for seconds

    freeze, make_constants = compile_fx.fw_compiler_freezing, freezing.replace_params_with_constants

    def fw_compiler_freezing(module: GraphModule, inputs: Any, **keywords: Any) -> Any:  # noqa: ANN401 - of PyTorch
        context = torch._guards.TracingContext.try_get()  # noqa: SLF001 - as freezing itself does
        if context is None or V.aot_compilation or not is_on():
            return freeze(module, inputs, **keywords)
        why_none = _why_none_is_constant(module, context, inputs, keywords["num_example_inputs"])
        if why_none:
            _LOG.warning(why_none)
            note_varying(context.params_flat or ())  # which of them is not known here
            context.params_flat = []
            context.params_flat_unwrap_subclasses = []
            context.params_unwrapped_to_flat_index = []
            return freeze(module, inputs, **keywords)
        before = list(context.params_flat_unwrap_subclasses or ())
        plain = PlainGraph(module)
        compiled = freeze(module, inputs, **keywords)
        after = context.params_flat_unwrap_subclasses or ()
        frozen = [one if kept is None else None for one, kept in zip(before, after, strict=True)]
        weights = _named(frozen, keywords.get("dynamo_model"))
        if not weights:
            return compiled
        plain.leave_out(frozen, context.params_unwrapped_to_flat_index or ())
        return FrozenWeights(weights).checked(compiled, plain)

    def replace_params_with_constants(graph: Any, weights: list[Any], facts: Any) -> Any:  # noqa: ANN401 - of PyTorch
        context = torch._guards.TracingContext.try_get()  # noqa: SLF001 - as above
        if context is None or V.aot_compilation or not is_on():
            return make_constants(graph, weights, facts)
        # Freezing has no call for a part of a tensor's subclass by itself.
        whole = {id(one) for one in context.params_flat or ()}
        note_varying(
            one
            for one, fact in zip(weights, facts.input_info, strict=False)
            if fact.mutation_type is not MutationType.NOT_MUTATED
        )
        written = SimpleNamespace(mutation_type=MutationType.MUTATED_IN_GRAPH)
        inputs = list(facts.input_info)
        for place, one in enumerate(weights):
            if id(one) in whole and one in _VARYING:
                inputs[place] = written
        seen = SimpleNamespace(
            input_info=inputs,
            output_info=facts.output_info,
            static_input_indices=facts.static_input_indices,
        )
        kept = make_constants(graph, weights, seen)
        facts.static_input_indices = seen.static_input_indices
        return kept

    compile_fx.fw_compiler_freezing = fw_compiler_freezing
    freezing.replace_params_with_constants = replace_params_with_constants
    register_optimizer_step_post_hook(_disable_dynamo(_note_step))


def _why_none_is_constant(
    module: GraphModule,
    context: Any,  # noqa: ANN401 - of PyTorch
    inputs: Sequence[Any],
    examples: int,
) -> str:
    """Return why no weight of a graph can be a constant, empty if they can."""
    if not _come_first(context, inputs, examples):
        return (
            "a graph writes a tensor that shares memory with others, so no weight of it is a "
            "constant, and its layers stay as they are; clone() the one that is a view."
        )
    convolutions = module.graph.find_nodes(op="call_function", target=ATEN.convolution.default)
    if any(one.meta["val"].dtype is torch.float64 for one in convolutions):
        return (
            "a graph has a convolution in float64, which PyTorch cannot compile with constant "
            "weights, so none of it is a constant, and its layers stay as they are."
        )
    return ""


def _come_first(context: Any, inputs: Sequence[Any], others: int) -> bool:  # noqa: ANN401 - of PyTorch
    """Return whether the weights are the first arguments of a graph, as freezing takes for granted.

    They are not where a graph writes one of several that share memory: PyTorch puts one argument
    for all of these before the others. Parts of a tensor's subclass are counted.
    """
    return len(inputs) >= len(context.params_flat_unwrap_subclasses or ()) + others


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
    native.gemm_tuner_changed_weight.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    native.gemm_tuner_note_written.restype = None
    native.gemm_tuner_note_written.argtypes = (
        ctypes.c_void_p,
        *native.gemm_tuner_know_weights.argtypes,
    )
    native.gemm_tuner_forget_weights.restype = None
    native.gemm_tuner_forget_weights.argtypes = (ctypes.c_void_p,)
    return native
