"""A linear layer with torchao's weights of integers that calls a tuned kernel, in eager mode."""

from typing import Any

import torch
from torch.nn import functional

from gemm_tuner.domain.problem import Problem
from gemm_tuner.torch.eager.integer_weights import IntegerWeights, integers_of, parts_of
from gemm_tuner.torch.eager.tuned_linear import (
    Packed,
    PackedLayer,
    TunedLinear,
    is_cast,
    is_followed,
    is_transformed,
    note_memory,
    state_of,
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
        is_held = tuned.layer is None or tuned.has_kernel(input)  # None: not looked up yet
        if not is_held or is_cast() or (not tuned.is_fixed and is_transformed()):
            return tuned.plain(input, weight, bias)
        packed = tuned.packed_now(weight)
        is_taken = packed is not None and tuned.layer.takes(input, bias, weight.dtype)
        if not is_taken or not tuned.has_kernel(input):
            return tuned.plain(input, weight, bias)
        weights, number = packed
        try:
            return torch.ops.gemm_tuner.linear.default(input, weights, bias, number, None, None)
        except NotImplementedError:  # recorded for a derivative
            return functional.linear(input, weight, bias)


class PackedIntegers(PackedLayer):
    """The kernels of one layer, and the integers packed for them."""

    def packed_now(self, weight: Any) -> tuple[Any, int] | None:  # noqa: ANN401 - a tensor
        """Return the weights packed, again if they changed since, and the number of the layer.

        None too where a part of them is recorded for a derivative.
        """
        packed = self.packed
        try:
            at = _state_of(weight)
        except (AttributeError, RuntimeError):  # of another class, or made in inference mode
            return None
        if packed is None or packed.weights[0] is not weight or packed.at != at:
            packed = self._packed_anew(weight)
            self.packed = packed
        is_recorded = torch.is_grad_enabled() and any(one.requires_grad for one in parts_of(weight))
        return None if is_recorded else packed.result

    def elements_of(self, weight: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a tensor
        """Return the integers of a layer, their scales and zero points, as kernels read them."""
        given = integers_of(weight)
        return (None,) if given is None else given.read()

    def _packed_anew(self, weight: Any) -> Packed:  # noqa: ANN401 - a tensor
        layer, given = self.looked_up(), integers_of(weight)
        for one in parts_of(weight):
            note_memory(one)
        at, result = _state_of(weight), None
        if layer is not None and given is not None and _is_of(layer.problem, given):
            with torch.no_grad():
                elements, *groups = given.read()
                packed = torch.ops.gemm_tuner.pack(
                    elements, layer.packed_bytes, layer.number, *groups
                )
            result = packed, layer.number
        # While they are held, nothing else gets their addresses.
        return Packed(at, 0, (weight, *parts_of(weight)), result)


def _is_of(problem: Problem, given: IntegerWeights) -> bool:
    asked = (problem.n, problem.k), problem.types.text, problem.w_group
    is_here = all(one.is_cpu for one in given.held)
    return is_here and asked == (given.sizes, given.types, given.group)


def _state_of(weight: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a tensor
    """Return what changes where weights do: torchao writes to parts below what counts versions."""
    states = map(state_of, parts_of(weight))
    return (weight._version, weight.dtype, weight.shape, *states)  # noqa: SLF001 - nothing else tells
