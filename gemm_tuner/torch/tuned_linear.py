"""A linear layer that calls a tuned kernel, in eager mode."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from gemm_tuner.errors import GemmTunerError
from gemm_tuner.torch.operators import TYPES, OperatorLayer, add_layer
from gemm_tuner.torch.sources import WantedLayer, open_source

_LOG = logging.getLogger(__name__)


class TunedLinear(torch.nn.Linear):  # type: ignore[misc]  # without PyTorch, it is Any
    """A linear layer that calls a tuned kernel where it can, and is an ordinary one elsewhere.

    Its parameters are those of the layer that it was, and so are their names in a `state_dict`. The
    packed copy follows when they change in place or are replaced.

    What is recorded for a derivative, a subclass of `Tensor`, or what is being traced, exported or
    compiled goes the ordinary way, and so does a number of rows that no kernel is for.
    """

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        """Return `x @ weight.T + bias`; x is (..., k), y is (..., n)."""
        parameters = self._parameters  # self.weight costs as much as a small product
        weight, bias = parameters["weight"], parameters["bias"]
        packed = None if _is_followed() else self._tuned.packed_now(weight)
        if packed is None:
            return functional.linear(x, weight, bias)
        return torch.ops.gemm_tuner.linear_or_plain.default(x, weight, bias, *packed)


def _is_followed() -> bool:
    """Return whether a compiler or a tracer follows what is called, to repeat it later."""
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing())


@dataclass(slots=True, eq=False)
class PackedLayer:
    """The kernels of one layer, and the weights packed for them."""

    wanted: WantedLayer
    source: str | None  # where a copy in another process asks; None for nowhere
    layer: OperatorLayer | None = None
    is_looked_up: bool = True
    packed: tuple[Any, int] | None = None  # and the number of the layer
    packed_at: tuple[int, int] | None = None
    weight: Any = None  # as it was packed: while it is held, nothing else gets its address

    def __deepcopy__(self, _memo: object) -> "PackedLayer":
        """Return the same kernels for other weights, which are packed when they are used."""
        return PackedLayer(self.wanted, self.source, self.layer, self.is_looked_up)

    def __reduce__(self) -> tuple[object, ...]:
        """Return what asks for the kernels again in the process where it is unpickled."""
        return PackedLayer, (self.wanted, self.source, None, self.source is None)

    def packed_now(self, weight: Any) -> tuple[Any, int] | None:  # noqa: ANN401 - a tensor
        """Return the weights packed, again if they changed since, and the number of the layer."""
        try:
            now = (weight._version, weight.data_ptr())  # noqa: SLF001 - nothing else tells
        except RuntimeError:  # made in inference mode, or of no memory
            now = None
        if now is None or now != self.packed_at:
            self.packed = self._pack(weight)
            self.packed_at, self.weight = now, weight.detach()
        return self.packed

    def _pack(self, weight: Any) -> tuple[Any, int] | None:  # noqa: ANN401 - a tensor
        if not self.is_looked_up:
            self._look_up()
        layer = self.layer
        if (
            layer is None
            or type(weight) is not torch.nn.Parameter
            or weight.is_inference()
            or weight.shape != (layer.problem.n, layer.problem.k)
            or TYPES.get(weight.dtype) != layer.problem.types.text
            or not weight.is_cpu
        ):
            return None
        with torch.no_grad():
            packed = torch.ops.gemm_tuner.pack(weight.detach(), layer.packed_bytes, layer.number)
        return packed, layer.number

    def _look_up(self) -> None:
        self.is_looked_up = True
        try:
            found = open_source(self.source).find(self.wanted)
            self.layer = add_layer(found.kernels) if found.kernels else None
        except GemmTunerError as error:
            _LOG.warning("A layer computes as it would without gemm-tuner: %s", error)


def restore_layer(module: Any) -> None:  # noqa: ANN401 - a module
    """Make a layer an ordinary one again, if it is a tuned one."""
    if type(module) is TunedLinear:
        module.__class__ = torch.nn.Linear
        module.__dict__.pop("_tuned")
