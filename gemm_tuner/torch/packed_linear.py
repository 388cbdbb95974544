"""A linear layer that holds its weights in packed form alone, in eager mode."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.torch.operators import OperatorLayer
from gemm_tuner.torch.tuned_linear import (
    TunedLinear,
    apart,
    is_cast,
    is_compiled,
    is_followed,
    no_script,
)

_LOG = logging.getLogger(__name__)

_INTEGERS = {4: torch.int32, 2: torch.int16}  # by the bytes of an element


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """The weights of a layer as its kernels read them, and what they were."""

    layer: OperatorLayer
    packed: Any
    dtype: Any
    requires_grad: bool

    def holds(self, x: Any) -> bool:  # noqa: ANN401 - a tensor
        """Return whether kernels can compute x, in whatever number of rows."""
        k = self.layer.problem.k
        return bool(
            x.dtype is self.dtype and x.is_cpu and x.numel() and x.dim() and x.shape[-1] == k
        )

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
        with _disable_current_modes(), torch.no_grad():
            return torch.ops.gemm_tuner.unpack(self.packed, self.layer.number)

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
        return self._held.unpacked()

    def forward(self, input: Any) -> Any:  # noqa: A002, ANN401 - a tensor, named as in PyTorch
        """Return `input @ weight.T + bias`; input is (..., k), the result is (..., n).

        Raises:
            InvalidSetting: it is traced or exported.
        """
        if is_followed():
            return self._followed(input)
        held, bias = self._held, self._parameters["bias"]
        if type(input) is torch.Tensor and not is_cast() and held.holds(input):
            try:
                return held.times(input, bias)
            except NotImplementedError:  # recorded for a derivative
                pass
        _warn_of_unpacking()
        return functional.linear(input, held.unpacked(), bias)

    def _followed(self, x: Any) -> Any:  # noqa: ANN401 - tensors
        if is_compiled():
            return apart(self, x)
        if torch.compiler.is_compiling() or torch._C._is_tracing():  # noqa: SLF001 - as is_followed
            raise InvalidSetting(
                f"{self!r} has its weights in packed form alone, and cannot be traced or exported; "
                "call gemm_tuner.torch.restore on the model first."
            )
        return functional.linear(x, self._held.unpacked(), self._parameters["bias"])

    def __prepare_scriptable__(self) -> Any:  # noqa: ANN401 - a module, named by PyTorch
        """Refuse `torch.jit.script`.

        Raises:
            InvalidSetting: always.
        """
        raise no_script(repr(self))

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - as of a module
        """Set an attribute; new weights take the place of the packed ones."""
        if name == "weight":
            hold_weights(self)
            setattr(self, name, value)
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, _protocol: Any) -> Any:  # noqa: ANN401 - as of an object
        """Return what makes a copy, which has all weights."""
        state = {**self.__dict__, "_parameters": self._with_weights()}
        del state["_held"]
        return _without_state, (), state

    def _with_weights(self) -> dict[str, Any]:
        weight = torch.nn.Parameter(self._held.unpacked(), self._held.requires_grad)
        return {"weight": weight, **self._parameters}

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


def _without_state() -> Any:  # noqa: ANN401 - a module
    """Return a layer that gets the state of another."""
    return TunedLinear.__new__(TunedLinear)


def free_layer(module: Any) -> str | None:  # noqa: ANN401 - a module
    """Let a `TunedLinear` hold its weights in packed form alone, or return why it keeps them."""
    tuned, weight = module._tuned, module._parameters.get("weight")  # noqa: SLF001 - of this module
    result = None if type(module) is not TunedLinear else tuned.packed_now(weight)
    if result is None:
        return "its weights are not packed as they are"
    held = PackedWeights(tuned.layer, result[0], weight.dtype, weight.requires_grad)
    integers = _INTEGERS[weight.dtype.itemsize]
    if not torch.equal(held.unpacked().view(integers), weight.detach().view(integers)):
        return "its kernels pack weights in a form that cannot be unpacked"
    tuned.packed = None  # it holds the weights
    del module._parameters["weight"]  # noqa: SLF001 - of this module
    module.__dict__["_held"] = held
    module.__class__ = PackedLinear
    return None


def hold_weights(module: Any) -> None:  # noqa: ANN401 - a module
    """Let a `PackedLinear` be a `TunedLinear` again, with its weights; others stay as they are."""
    if not isinstance(module, PackedLinear):
        return
    parameters = module._with_weights()  # noqa: SLF001 - of this module
    module._parameters.clear()  # noqa: SLF001
    module._parameters.update(parameters)  # noqa: SLF001
    module.__dict__.pop("_held")
    module.__class__ = TunedLinear


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
