"""How far a quantised model is from the model of floats that it was made of."""

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.utils import _pytree

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.torch.calls import Call, calls_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far the outputs of two models are apart, over all inputs.

    Errors are absolute, beside `largest`, the largest magnitude of an output of the first model;
    they are infinite where only one of the models computes a NaN or an infinity. `top1` is the
    share of the rows for which both have the same class first, None where classes were not asked
    for.
    """

    largest_error: float
    mean_error: float
    largest: float
    top1: float | None = None

    def __str__(self) -> str:
        """Return it in words."""
        text = (
            f"largest error {self.largest_error:.3g}, mean error {self.mean_error:.3g}, "
            f"of outputs up to {self.largest:.3g}"
        )
        return text if self.top1 is None else f"{text}; the same class first in {self.top1:.2%}"


def compare(
    model: Any,  # noqa: ANN401 - a module
    quantised: Any,  # noqa: ANN401 - a module
    example_inputs: Any,  # noqa: ANN401 - tensors
    *,
    classes: int | None = None,
) -> Comparison:
    """Return how far a quantised model is from the model that it was made of.

    Both are called without gradients, as they are: compiled or not, with kernels or without.

    Args:
        model: a `torch.nn.Module`, or anything that is called.
        quantised: another one, which takes and returns the same.
        example_inputs: a tensor, a tuple, or a dict of keyword arguments; or a list of these.
        classes: the dimension of the outputs that has a number for each class, such as -1.

    Raises:
        InvalidSetting: there are no inputs, the outputs are not alike, or have no such dimension.
    """
    calls = calls_of(example_inputs)
    if not calls:
        raise InvalidSetting("there are no example inputs; give at least one.")
    expected, computed = (
        [output for call in calls for output in _outputs(one, call)] for one in (model, quantised)
    )
    shapes = [[list(output.shape) for output in outputs] for outputs in (expected, computed)]
    if shapes[0] != shapes[1]:
        raise InvalidSetting(
            f"the models return tensors of the shapes {shapes[0]} and {shapes[1]}; give a model "
            "and what was made of it."
        )
    errors = torch.cat(list(map(_errors, expected, computed)))
    magnitudes = torch.cat([one.flatten().abs() for one in expected])
    finite = magnitudes[magnitudes.isfinite()]
    return Comparison(
        largest_error=float(errors.max()) if errors.numel() else 0.0,
        mean_error=float(errors.mean()) if errors.numel() else 0.0,
        largest=float(finite.max()) if finite.numel() else 0.0,
        top1=None if classes is None else _top1(expected, computed, classes),
    )


def _outputs(model: Any, call: Call) -> list[Any]:  # noqa: ANN401 - a module
    """Return copies of the tensors that a model returns, in float64.

    Raises:
        InvalidSetting: it returns none.
    """
    with torch.no_grad():
        output = call.copied().on(model)
    found = [one for one in _pytree.tree_leaves(output) if isinstance(one, torch.Tensor)]
    if not found:
        raise InvalidSetting(
            f"a model returns a {type(output).__name__}, in which no tensor is found; give one "
            "that returns a tensor, or a tuple, list or dict of tensors."
        )
    return [_as_floats(one.detach()) for one in found]


def _as_floats(output: Any) -> Any:  # noqa: ANN401 - a tensor
    """Return a tensor in float64, with the parts of complex numbers as a last dimension."""
    if output.is_complex():
        output = torch.view_as_real(output.resolve_conj())
    return output.to(torch.float64, copy=True)


def _errors(expected: Any, computed: Any) -> Any:  # noqa: ANN401 - tensors
    is_same = (expected == computed) | (expected.isnan() & computed.isnan())
    errors = torch.where(is_same, 0.0, (expected - computed).abs())
    return errors.nan_to_num(nan=inf, posinf=inf).flatten()


def _top1(expected: list[Any], computed: list[Any], classes: int) -> float:
    for one in expected:
        if not -one.dim() <= classes < one.dim() or not one.numel():
            raise InvalidSetting(
                f"an output has the shape {list(one.shape)}, so classes = {classes} is no "
                "dimension of it with elements; give another, or None."
            )
    same = [
        (one.argmax(classes) == other.argmax(classes)).flatten()
        for one, other in zip(expected, computed, strict=True)
    ]
    return float(torch.cat(same).double().mean())
