"""A linear layer with torchao's weights of integers that calls a tuned kernel, in eager mode."""

from typing import Any

import torch
from torch.nn import functional

from gemm_tuner.torch.integer_weights import IntegerWeights, integers_of
from gemm_tuner.torch.tuned_linear import (
    Packed,
    PackedLayer,
    TunedLinear,
    is_cast,
    is_followed,
    is_transformed,
)


class WeightOnlyLinear(TunedLinear):
    """A linear layer whose kernels read integers, where torchao makes floats of all at each call.

    Its weights stay torchao's tensor. The packed copy follows when they change in place or are
    replaced. What a `TunedLinear` leaves to the ordinary way, this leaves to torchao's.
    """

    def forward(self, input: Any) -> Any:  # noqa: A002, ANN401 - a tensor, named as in PyTorch
        """Return `input @ weight.T + bias`; input is (..., k), the result is (..., n)."""
        parameters = self._parameters
        try:
            tuned, weight, bias = self._tuned, parameters["weight"], parameters["bias"]
        except (AttributeError, KeyError):  # restored by another thread, or computed from others
            return super().forward(input)
        if type(input) is not torch.Tensor or is_followed():
            return self._ordinary(input, weight, bias)
        if is_cast() or is_transformed():
            return tuned.plain(input, weight, bias)
        packed = tuned.packed_now(weight)
        is_taken = (
            packed is not None
            and tuned.layer.takes(input, bias, weight.dtype)
            and tuned.has_kernel(input)
        )
        if not is_taken:
            return tuned.plain(input, weight, bias)
        weights, number = packed
        try:
            return torch.ops.gemm_tuner.linear.default(input, weights, bias, number, None, None)
        except NotImplementedError:  # recorded for a derivative
            return functional.linear(input, weight, bias)


class PackedIntegers(PackedLayer):
    """The kernels of one layer, and the integers packed for them."""

    module_class = WeightOnlyLinear

    def packed_now(self, weight: Any) -> tuple[Any, int] | None:  # noqa: ANN401 - a tensor
        """Return the weights packed, again if they changed since, and the number of the layer."""
        given = integers_of(weight)
        if given is None:
            return None
        try:
            # Nothing else tells of a change.
            at = tuple((one._version, one.data_ptr(), one.stride()) for one in given.held)  # noqa: SLF001
        except RuntimeError:  # made in inference mode, or of no memory
            return None
        packed = self.packed
        if packed is None or packed.at != at:
            # While these arrays are held, nothing else gets their addresses.
            held = tuple(one.detach() for one in given.held)
            self.packed = packed = Packed(at, 0, held, self._packed_of(given))
        return packed.result

    def elements_of(self, weight: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a tensor
        """Return the integers of a layer, their scales and zero points, as kernels read them."""
        given = integers_of(weight)
        return (None,) if given is None else given.read()

    def _packed_of(self, given: IntegerWeights) -> tuple[Any, int] | None:
        layer = self.looked_up()
        if layer is None:
            return None
        problem = layer.problem
        facts = (problem.n, problem.k), problem.types.text, problem.w_group
        if facts != (given.sizes, given.types, given.group):
            return None
        w, scales, zero_points = given.read()
        with torch.no_grad():
            packed = torch.ops.gemm_tuner.pack(
                w, layer.packed_bytes, layer.number, scales, zero_points
            )
        return packed, layer.number
