"""A linear layer that holds its weights in packed form alone, in eager mode."""

import logging
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from multiprocessing.reduction import ForkingPickler
from threading import RLock
from typing import Any
from weakref import ref

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.torch.eager.packed_by_onednn import PackedByOneDnn
from gemm_tuner.torch.eager.tuned_linear import (
    TunedLinear,
    apart,
    is_cast,
    is_compiled,
    is_followed,
    no_script,
)
from gemm_tuner.torch.operators import OperatorLayer

_LOG = logging.getLogger(__name__)

_INTEGERS = {4: torch.int32, 2: torch.int16}  # by the bytes of an element
_CHANGING = RLock()  # who changes how a layer holds its weights; calls go on meanwhile


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """The weights of a layer as its kernels read them, and what they were."""

    layer: OperatorLayer
    packed: Any
    dtype: Any
    requires_grad: bool

    def holds(self, x: Any, bias: Any) -> bool:  # noqa: ANN401 - tensors
        """Return whether kernels can compute x with a bias, in whatever number of rows."""
        return self.layer.takes(x, bias, self.dtype)

    def times(self, x: Any, bias: Any) -> Any:  # noqa: ANN401 - tensors
        """Return the layer's result, in pieces where no kernel computes as many rows.

        Raises:
            NotImplementedError: somebody records the call for a derivative.
        """
        problem = self.layer.problem
        rows = x.numel() // problem.k
        if self.layer.kernel_for(rows):
            return self._call(x, bias)
        flat = x.reshape(rows, problem.k)
        pieces = [self._piece(flat[low:high], bias) for low, high in self._cuts(rows)]
        return torch.cat(pieces).reshape(*x.shape[:-1], problem.n)

    def unpacked(self) -> Any:  # noqa: ANN401 - a tensor
        """Return the weights (n, k), bit for bit as they were packed."""
        with _disable_current_modes(), torch.inference_mode(mode=False), torch.no_grad():
            return torch.ops.gemm_tuner.unpack(self.packed, self.layer.number)

    def parameter(self) -> Any:  # noqa: ANN401 - a parameter
        """Return the weights as the parameter that they were."""
        with torch.inference_mode(mode=False):  # or none could train or pack them any more
            return torch.nn.Parameter(self.unpacked(), self.requires_grad)

    def _cuts(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield the pieces that kernels compute: the largest first, the last perhaps too short."""
        ends = sorted({one.rows[1] for one in self.layer.kernels}, reverse=True)
        at = 0
        while at < rows:
            left = rows - at
            fitting = next((end for end in ends if end <= left), left)
            step = left if self.layer.kernel_for(left) else fitting
            yield at, at + step
            at += step

    def _piece(self, x: Any, bias: Any) -> Any:  # noqa: ANN401 - tensors
        """Return the result for some rows; where they are too few for a kernel, zeros follow."""
        rows = x.shape[0]
        if self.layer.kernel_for(rows):
            return self._call(x, bias)
        least = min(low for low, _high in (one.rows for one in self.layer.kernels) if low > rows)
        return self._call(functional.pad(x, (0, 0, 0, least - rows)), bias)[:rows]

    def _call(self, x: Any, bias: Any) -> Any:  # noqa: ANN401 - tensors
        return torch.ops.gemm_tuner.linear.default(
            x, self.packed, bias, self.layer.number, None, None
        )


class PackedLinear(torch.nn.Linear):  # type: ignore[misc]  # without PyTorch, it is Any
    """A linear layer that holds its weights in packed form alone.

    `weight` unpacks them, and so does what cannot be computed from them: recorded calls, autocast,
    other types. They are in its `state_dict`. It becomes a `TunedLinear` again, with all weights,
    where they may change: when it is loaded, moved or cast, or gets a parameter. So does a copy.
    """

    @property
    def weight(self) -> Any:  # noqa: ANN401 - a tensor
        """Return the weights, unpacked: a copy, which takes a while."""
        if not torch.compiler.is_compiling():
            _warn_of_reading()
        return self._held.unpacked()

    def forward(self, input: Any) -> Any:  # noqa: A002, ANN401 - a tensor, named as in PyTorch
        """Return `input @ weight.T + bias`; input is (..., k), the result is (..., n).

        Raises:
            InvalidSetting: it is traced or exported, or the order of additions is fixed and no
                kernel takes the call.
        """
        held = vars(self).get("_held")
        if held is None:  # another thread restored it, or who calls kept this function
            return type(self).forward(self, input)
        bias = self._parameters["bias"]
        if is_followed():
            return self._followed(input, held, bias)
        if type(input) is torch.Tensor and not is_cast() and held.holds(input, bias):
            try:
                return held.times(input, bias)
            except NotImplementedError:  # recorded for a derivative
                return _ordinary(input, held, bias)
        if torch.is_grad_enabled() and held.requires_grad:
            return _ordinary(input, held, bias)
        _warn_of_unpacking()
        return self._tuned.plain(input, held.unpacked(), bias)

    def _followed(self, x: Any, held: PackedWeights, bias: Any) -> Any:  # noqa: ANN401 - tensors
        if is_compiled():
            return apart(self, x)
        if torch.compiler.is_compiling() or torch._C._is_tracing():  # noqa: SLF001 - as is_followed
            raise InvalidSetting(
                f"{self!r} has its weights in packed form alone, and cannot be traced or exported; "
                "call gemm_tuner.torch.restore on the model first."
            )
        return functional.linear(x, held.unpacked(), bias)

    def __prepare_scriptable__(self) -> Any:  # noqa: ANN401 - a module, named by PyTorch
        """Refuse `torch.jit.script`.

        Raises:
            InvalidSetting: always.
        """
        raise no_script(repr(self))

    def __reduce_ex__(self, _protocol: Any) -> Any:  # noqa: ANN401 - as of an object
        """Return what makes a copy, which has all weights."""
        state = {**self.__dict__, "_parameters": self._with_weights()}
        del state["_held"]
        return _without_state, (), state

    def _with_weights(self) -> dict[str, Any]:
        return {"weight": self._held.parameter(), **self._parameters}

    # What may change weights has them first. PyTorch calls these of each module.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: ANN401, FBT001
        destination[f"{prefix}weight"] = self._held.unpacked()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *arguments: Any) -> None:  # noqa: ANN401
        hold_weights(self)
        self._load_from_state_dict(*arguments)

    def _apply(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
        hold_weights(self)
        return self._apply(*arguments, **keywords)

    def register_parameter(self, name: str, param: Any) -> None:  # noqa: ANN401 - one or None
        """Add a parameter to the layer, which has its weights then."""
        hold_weights(self)
        self.register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Give the layer new weights."""
        hold_weights(self)
        self.reset_parameters()


class _OtherParameters(dict[str, Any]):
    """The parameters of a layer but its weights.

    Who looks whether these are there, or takes one away, is about to change the layer, as functions
    of PyTorch do: it has its weights first.
    """

    def __init__(self, module: PackedLinear, others: Mapping[str, Any]) -> None:
        super().__init__(others)
        self._module = ref(module)

    def __contains__(self, name: object) -> bool:
        if name == "weight":
            return name in self._all()
        return super().__contains__(name)

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def _all(self) -> dict[str, Any]:
        module = self._module()
        hold_weights(module)
        parameters: dict[str, Any] = {} if module is None else module._parameters  # noqa: SLF001
        return parameters


def _ordinary(x: Any, held: PackedWeights, bias: Any) -> Any:  # noqa: ANN401 - tensors
    """Return what an ordinary layer computes."""
    _warn_of_unpacking()
    return functional.linear(x, held.unpacked(), bias)


class _InPickle:
    """Becomes a parameter when it is unpickled. The pickle has its values."""

    def __init__(self, parameter: Any) -> None:  # noqa: ANN401 - a parameter
        self._parameter = parameter

    def __reduce__(self) -> tuple[object, ...]:
        return pickle.loads, (pickle.dumps(self._parameter, pickle.HIGHEST_PROTOCOL),)


def _for_another_process(layer: PackedLinear) -> tuple[Any, tuple[Any, ...], Any]:
    """Return what makes a copy of a layer in another process.

    PyTorch shares the memory of tensors with it, as long as somebody here holds them, and nobody
    holds what was unpacked for a copy.
    """
    make, arguments, state = layer.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    parameters = state["_parameters"]
    parameters["weight"] = _InPickle(parameters["weight"])
    return make, arguments, state


ForkingPickler.register(PackedLinear, _for_another_process)


def _without_state() -> Any:  # noqa: ANN401 - a module
    """Return a layer that gets the state of another."""
    return TunedLinear.__new__(TunedLinear)


def free_layer(module: Any) -> str | None:  # noqa: ANN401 - a module
    """Let a `TunedModule` hold its weights in packed form alone, or return why it keeps them."""
    with _CHANGING:
        if module.is_transposed:
            return f"it is a {module.plain_class.__name__}, and only torch.nn.Linear is freed"
        if type(module) is not TunedLinear:
            return "its parameters are computed from others"
        tuned, parameters = module._tuned, module._parameters  # noqa: SLF001 - of this module
        if isinstance(tuned, PackedByOneDnn):
            return "oneDNN computes it, and what it packs cannot be unpacked"
        weight = parameters["weight"]
        result = tuned.packed_now(weight)
        if result is None:
            return "its weights are not packed as they are"
        held = PackedWeights(tuned.layer, result[0], weight.dtype, weight.requires_grad)
        integers = _INTEGERS[weight.dtype.itemsize]
        if not torch.equal(held.unpacked().view(integers), weight.detach().view(integers)):
            return "its kernels pack weights in a form that cannot be unpacked"
        others = {name: one for name, one in parameters.items() if name != "weight"}
        # Other threads may call it meanwhile: what they read is there, in this order.
        module.__dict__["_held"] = held
        module.__class__ = PackedLinear
        module.__dict__["_parameters"] = _OtherParameters(module, others)
        tuned.packed = None  # it holds the weights
    return None


def hold_weights(module: Any) -> None:  # noqa: ANN401 - a module
    """Let a `PackedLinear` be a `TunedLinear` again, with its weights; others stay as they are."""
    with _CHANGING:
        if isinstance(module, PackedLinear):
            # Other threads may call it meanwhile: what they read is there, in this order.
            module.__dict__["_parameters"] = module._with_weights()  # noqa: SLF001
            module.__class__ = TunedLinear
            module.__dict__.pop("_held")


def hold_all_weights(model: Any) -> None:  # noqa: ANN401 - a module
    """Let all layers of a model have their weights, if it is a module."""
    if isinstance(model, torch.nn.Module):
        for module in model.modules():
            hold_weights(module)


@cache
def _warn_of_unpacking() -> None:
    """Warn once of calls that unpack weights."""
    _LOG.warning(
        "A layer whose weights were freed unpacks them at each call that its kernels cannot "
        "compute, which is slow: call it under torch.no_grad(), without autocast, with a plain "
        "tensor of its type, or call gemm_tuner.torch.restore."
    )


@cache
def _warn_of_reading() -> None:
    """Warn once of who reads weights, and may write to them."""
    _LOG.warning(
        "The weights of a layer that were freed are unpacked each time that they are read, which "
        "is slow, and what is written to them is lost: call gemm_tuner.torch.restore first."
    )
