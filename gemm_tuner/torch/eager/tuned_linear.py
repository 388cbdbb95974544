"""Linear layers that call a tuned kernel, in eager mode."""

import logging
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from math import inf
from typing import Any, ClassVar

import torch
from torch._compile import (
    _disable_dynamo,
)  # torch.compiler.disable imports the compiler, for seconds
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

from gemm_tuner.errors import GemmTunerError, InvalidSetting
from gemm_tuner.layers.sources import open_source
from gemm_tuner.layers.wanted import WantedLayer
from gemm_tuner.torch.operators import BY_ONEDNN, TYPES, OperatorLayer, add_layer

_LOG = logging.getLogger(__name__)

# The number of the last writing that PyTorch may not have counted, by the address of the memory
# where packed weights come from: layers with tied weights share it.
_WRITES: dict[int, int] = {}
_NUMBERS = count(1)


class TunedModule:
    """A module that calls a tuned kernel where it can, and is of `plain_class` elsewhere.

    Its parameters are those of the layer that it was, and so are their names in a `state_dict`. The
    packed copy follows when they change in place, are trained, or are replaced. Where it
    `is_transposed`, its weights are of (k, n).

    What is recorded for a derivative, a subclass of `Tensor`, or what is being traced, exported or
    compiled goes the ordinary way, and so does a number of rows that no kernel is for. Where the
    order of additions is fixed, such rows are refused instead, and `torch.compile` leaves the layer
    to eager mode.
    """

    plain_class: ClassVar[Any]
    is_transposed: ClassVar[bool] = False

    weight: Any
    bias: Any
    _parameters: Any
    _tuned: Any

    def forward(self, input: Any) -> Any:  # noqa: A002, ANN401 - a tensor, named as in PyTorch
        """Return `input @ weight.T + bias`; input is (..., k), the result is (..., n)."""
        parameters = self._parameters  # self.weight costs as much as a small product
        try:
            tuned, weight, bias = self._tuned, parameters["weight"], parameters["bias"]
        except (AttributeError, KeyError):
            return _otherwise(self, input)
        rows = weight.t() if self.is_transposed else weight
        if type(input) is not torch.Tensor or is_followed():
            return self._ordinary(input, rows, bias)
        if torch.is_grad_enabled() and weight.requires_grad:
            _note_writing(weight)  # what is recorded is likely to be trained by it
            return functional.linear(input, rows, bias)
        is_fixed = tuned.is_fixed
        # The operator would find out, too, but to call it takes longer than torch's own, and
        # torch.vmap would call it for each sample.
        is_held = tuned.least <= input.numel() <= tuned.most
        if not is_held or is_cast() or (not is_fixed and is_transformed()):
            return tuned.plain(input, rows, bias)
        packed = tuned.packed_now(weight)
        is_exact = is_fixed or (packed is not None and packed[1] == BY_ONEDNN)
        if packed is None or (is_exact and not tuned.has_kernel(input)):
            return tuned.plain(input, rows, bias)
        return torch.ops.gemm_tuner.linear_or_plain.default(input, rows, bias, *packed, is_fixed)

    def __prepare_scriptable__(self) -> Any:  # noqa: ANN401 - a module, named by PyTorch
        """Refuse `torch.jit.script`, whose language has no word for such calls.

        Raises:
            InvalidSetting: always.
        """
        raise no_script(repr(self))

    def _ordinary(self, x: Any, weight: Any, bias: Any) -> Any:  # noqa: ANN401 - tensors
        """Return what an ordinary layer computes of what no kernel reads.

        Raises:
            InvalidSetting: the order of additions is fixed, and it is not followed or recorded.
        """
        if torch.is_grad_enabled() and weight.requires_grad:
            return functional.linear(x, weight, bias)
        if is_followed():
            is_apart = self._tuned.is_fixed and is_compiled()
            return apart(self, x) if is_apart else functional.linear(x, weight, bias)
        return self._tuned.plain(x, weight, bias)


class TunedLinear(TunedModule, torch.nn.Linear):  # type: ignore[misc]  # without PyTorch, it is Any
    """A linear layer that calls a tuned kernel where it can, and is an ordinary one elsewhere."""

    plain_class = torch.nn.Linear


def _otherwise(layer: Any, x: Any) -> Any:  # noqa: ANN401 - a layer and tensors
    """Return what a layer computes that has not the weights of its own that kernels read."""
    if isinstance(layer, TunedModule):  # they are computed, such as by torch.nn.utils.prune
        weight = layer.weight.t() if layer.is_transposed else layer.weight
        return layer._ordinary(x, weight, layer.bias)  # noqa: SLF001 - of this module
    return type(layer).forward(layer, x)  # freed or restored, and who calls kept the function


def no_script(name: str) -> InvalidSetting:
    """Return the error of a module that `torch.jit.script` shall compile."""
    return InvalidSetting(
        f"torch.jit.script cannot compile {name}, which calls tuned kernels; call "
        "gemm_tuner.torch.restore on the model first, or use torch.jit.trace or torch.compile."
    )


def is_followed() -> bool:
    """Return whether a compiler or a tracer follows what is called, to repeat it later."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._is_tracing()  # noqa: SLF001 - torch.jit.is_tracing takes four times as long
        or torch._C._len_torch_dispatch_stack()  # noqa: SLF001 - make_fx; it has no public name
    )


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` computes what is called, such as `vmap`."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 - no public name


def state_of(tensor: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a tensor
    """Return what changes where a tensor is written to, or lies elsewhere.

    Raises:
        RuntimeError: it was made in inference mode, or has no memory.
    """
    memory = tensor.untyped_storage().data_ptr()
    version = tensor._version  # noqa: SLF001 - nothing else tells
    return version, tensor.data_ptr(), tensor.stride(), _WRITES.get(memory)


def note_memory(tensor: Any) -> None:  # noqa: ANN401 - a tensor
    """Let what optimizers write to a tensor be noted."""
    _follow_optimizers()
    _WRITES.setdefault(tensor.untyped_storage().data_ptr(), 0)


def is_compiled() -> bool:
    """Return whether `torch.compile` follows what is called; it can leave parts to eager mode."""
    return bool(torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting())


@_disable_dynamo  # type: ignore[untyped-decorator]  # without PyTorch, it is Any
def apart(layer: Any, x: Any) -> Any:  # noqa: ANN401 - a layer and tensors
    """Return what a layer computes in eager mode, between two compiled parts of a model."""
    return type(layer).forward(layer, x)  # its hooks are called by whoever called it


def is_cast() -> bool:
    """Return whether autocast gives products another type."""
    is_any = torch._C._is_any_autocast_enabled()  # noqa: SLF001 - a third of what is public
    return bool(is_any and torch.is_autocast_enabled("cpu"))


def _note_writing(tensor: Any) -> None:  # noqa: ANN401 - a tensor
    """Let layers pack their weights again if they lie in the memory of a tensor."""
    try:
        memory = tensor.untyped_storage().data_ptr()
    except RuntimeError:  # of no memory, such as in a transform
        return
    if memory in _WRITES:
        _WRITES[memory] = next(_NUMBERS)


@cache
def _follow_optimizers() -> None:
    """Let a step of any optimizer be noted: the fused ones write without raising versions."""

    def note(optimizer: Any, _arguments: object, _keywords: object) -> None:  # noqa: ANN401
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _note_writing(parameter)

    # A compiled step, which is in several parts anyway, calls it between them.
    register_optimizer_step_post_hook(_disable_dynamo(note))


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Packed weights with the number of their layer, or None if they cannot be packed."""

    at: tuple[Any, ...]  # version, address, strides and writing of the weights
    memory: int  # where an optimizer may write to them, 0 if none does
    weights: Any  # as they were packed: while they are held, nothing else gets their address
    result: tuple[Any, int] | None


@dataclass(slots=True, eq=False)
class PackedLayer:
    """The kernels of one layer, a module of `module_class`, and the weights packed for them."""

    wanted: WantedLayer
    source: str | None  # where a copy in another process asks; None for nowhere
    layer: OperatorLayer | None = None
    is_looked_up: bool = True
    packed: Packed | None = None
    module_class: Any = TunedLinear

    # Inputs of fewer or more elements have a number of rows that no kernel is for.
    least: float = field(init=False, default=0)
    most: float = field(init=False, default=inf)

    def __post_init__(self) -> None:
        """Learn for which inputs there are kernels."""
        self._use(self.layer)

    def __deepcopy__(self, _memo: object) -> "PackedLayer":
        """Return the same kernels for other weights, which are packed when they are used."""
        return type(self)(
            self.wanted,
            self.source,
            self.layer,
            self.is_looked_up,
            module_class=self.module_class,
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Return what asks for the kernels again in the process where it is unpickled."""
        is_looked_up = self.source is None
        return type(self), (self.wanted, self.source, None, is_looked_up, None, self.module_class)

    def packed_now(self, weight: Any) -> tuple[Any, int] | None:  # noqa: ANN401 - a tensor
        """Return the weights packed, again if they changed since, and the number of the layer."""
        packed = self.packed
        try:
            version = weight._version  # noqa: SLF001 - nothing else tells
            address, strides = weight.data_ptr(), weight.stride()
            if packed is not None:
                writing = _WRITES.get(packed.memory)
                if packed.at == (version, address, strides, writing):
                    return packed.result
            memory = weight.untyped_storage().data_ptr()
        except RuntimeError:  # made in inference mode, or of no memory
            return None
        # What is written from here on, also by another thread, is noted or raises the version.
        at = (version, address, strides, _WRITES.setdefault(memory, 0))
        self.packed = packed = Packed(at, memory, weight.detach(), self._pack(weight))
        return packed.result

    @property
    def is_fixed(self) -> bool:
        """Return whether the order of additions is fixed, as that of PyTorch is not."""
        return self.wanted.reduction == "fixed"

    def has_kernel(self, x: Any) -> bool:  # noqa: ANN401 - a tensor
        """Return whether a kernel computes as many rows as x has."""
        return self.layer is not None and self.layer.holds(x.numel() // self.wanted.k)

    def plain(self, x: Any, weight: Any, bias: Any) -> Any:  # noqa: ANN401 - tensors
        """Return what an ordinary layer computes.

        Raises:
            InvalidSetting: the order of additions is fixed.
        """
        if self.is_fixed and x.numel():
            rows = x.numel() // self.wanted.k
            raise InvalidSetting(
                f"no kernel computes {rows} rows of a layer with the reduction 'fixed' here; give "
                f"gemm_tuner.torch.replace these rows, such as rows=['1..{rows}'], and call the "
                "layer with a plain tensor, without autocast, with weights that are computed from "
                "no others, of the type and the sizes that they had."
            )
        return functional.linear(x, weight, bias)

    def elements_of(self, weight: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a tensor
        """Return the weights of a layer (n, k) as kernels read them: w, scales, zero points."""
        return (self.rows_of(weight.detach()).contiguous(),)

    def rows_of(self, weight: Any) -> Any:  # noqa: ANN401 - a tensor
        """Return the weights as (n, k)."""
        return weight.t() if self.module_class.is_transposed else weight

    def looked_up(self) -> OperatorLayer | None:
        """Return the kernels, which a copy in another process asks for at its first call."""
        if not self.is_looked_up:
            self._look_up()
        return self.layer

    def _pack(self, weight: Any) -> tuple[Any, int] | None:  # noqa: ANN401 - a tensor
        layer = self.looked_up()
        if (
            layer is None
            or type(weight) is not torch.nn.Parameter
            or self.rows_of(weight).shape != (layer.problem.n, layer.problem.k)
            or TYPES.get(weight.dtype) != layer.problem.types.text
            or not weight.is_cpu
        ):
            self._tell_of_other_weights(weight)
            return None
        _follow_optimizers()
        with torch.no_grad():
            rows = self.rows_of(weight.detach())
            packed = torch.ops.gemm_tuner.pack(rows, layer.packed_bytes, layer.number)
        return packed, layer.number

    def _tell_of_other_weights(self, weight: Any) -> None:  # noqa: ANN401 - a tensor
        """Warn of weights that were cast or quantised since: no kernel reads them."""
        kind = type(weight)
        is_quantised = kind is not torch.nn.Parameter and kind is not torch.Tensor
        is_alike = TYPES.get(weight.dtype) == self.wanted.dtype
        if self.layer is None or (is_alike and not is_quantised):
            return
        what = f"a {kind.__name__}" if is_quantised else str(weight.dtype)
        warn_of_plain(
            f"its weights are {what} now, and its kernels are for {self.wanted.dtype}. Call "
            "gemm_tuner.torch.replace again."
        )

    def _use(self, layer: OperatorLayer | None) -> None:
        self.layer = layer
        if layer is not None:
            rows = [one.rows for one in layer.kernels]
            self.least = min(low for low, _high in rows) * layer.problem.k
            self.most = max(high for _low, high in rows) * layer.problem.k

    def _look_up(self) -> None:
        self.is_looked_up = True
        try:
            found = open_source(self.source).find(self.wanted)
            self._use(add_layer(found.kernels) if found.kernels else None)
        except GemmTunerError as error:
            warn_of_plain(str(error))
            return
        if self.layer is None:
            reasons = " ".join(found.reasons)
            warn_of_plain(
                f"where its kernels came from, none is found any more. {reasons} "
                "Call gemm_tuner.torch.replace or tune_model on the model that was loaded."
            )


@cache
def warn_of_plain(reason: str) -> None:
    """Warn of layers that have no kernel any more, once for each reason."""
    _LOG.warning("A layer computes as it would without gemm-tuner: %s", reason)


def hold_in(module: Any, packed: PackedLayer) -> None:  # noqa: ANN401 - a module
    """Let a linear layer call what computes it from packed weights."""
    module.__class__ = packed.module_class
    module.__dict__["_tuned"] = packed


def refresh_layer(module: Any) -> None:  # noqa: ANN401 - a module
    """Let a layer pack its weights again at its next call, if it is a tuned one."""
    if isinstance(module, TunedModule):
        module._tuned.packed = None  # noqa: SLF001 - of this module


def restore_layer(module: Any) -> None:  # noqa: ANN401 - a module
    """Make a layer an ordinary one again, if it is a tuned one."""
    if not isinstance(module, TunedModule):
        return
    kind, plain = type(module), module.plain_class
    if kind is module._tuned.module_class:  # noqa: SLF001 - of this module
        module.__class__ = plain
    else:
        # PyTorch makes a class for each layer that it parametrizes, from the class that it had.
        kind.__bases__ = (plain,)
        kind.__name__ = f"Parametrized{plain.__name__}"
    module.__dict__.pop("_tuned")
