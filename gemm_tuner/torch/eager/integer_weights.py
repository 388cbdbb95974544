"""Weights of integers as torchao holds them, of a layer in eager mode."""

from dataclasses import dataclass
from typing import Any

import torch

from gemm_tuner.torch.inductor.four_bits import can_be_read, elements_of_int4, groups_of_int4
from gemm_tuner.torch.inductor.weight_only import WEIGHT_ONLY_LAYOUT
from gemm_tuner.torch.operators import TYPES

# Not imported: torchao takes seconds, and who has such a tensor has imported it.
_BYTES, _FOUR_BITS = "Int8Tensor", "Int4OpaqueTensor"


@dataclass(frozen=True, slots=True)
class IntegerWeights:
    """Weights (n, k), of the type and layout of a problem; `held` are the arrays they are read of.

    torchao computes with them as floats of `dtype`.
    """

    dtype: Any
    w_type: str
    group: int  # elements along k with one scale
    sizes: tuple[int, int]
    held: tuple[Any, ...]

    @property
    def types(self) -> str:
        """Return the types of a product by them, such as `bf16_s8_f32_bf16`."""
        return f"{TYPES[self.dtype]}_{self.w_type}_f32_{TYPES[self.dtype]}"

    @property
    def w_layout(self) -> str:
        """Return how the weights lie, and in which groups."""
        return WEIGHT_ONLY_LAYOUT if self.w_type == "s8" else f"nk:g{self.group}"

    def read(self) -> tuple[Any, Any, Any]:
        """Return the elements (n, k), in bytes, and their scales and zero points (n, groups).

        Two elements of 4 bits lie in a byte. Bytes have no zero points: None.
        """
        given, scales = (one.detach() for one in self.held)
        if self.w_type == "s8":
            return given.contiguous(), _column(scales, self.sizes[0]), None
        return (elements_of_int4(given, *self.sizes), *groups_of_int4(scales).unbind())


def is_of_torchao(weight: Any) -> bool:  # noqa: ANN401 - a tensor
    """Return whether torchao defines the class of a tensor."""
    return type(weight).__module__.startswith("torchao.")


def integers_of(weight: Any) -> IntegerWeights | None:  # noqa: ANN401 - a tensor
    """Return the weights that a tensor of torchao stands for, None where kernels read none."""
    return None if why_not_read(weight) else _read(weight)


def parts_of(weight: Any) -> tuple[Any, Any]:  # noqa: ANN401 - tensors
    """Return the elements and the scales that a tensor of torchao holds.

    Raises:
        AttributeError: it is none of those that kernels read.
    """
    is_bytes = type(weight).__name__ == _BYTES
    return weight.qdata, weight.scale if is_bytes else weight.scale_and_zero


def why_not_read(weight: Any) -> str:  # noqa: ANN401 - a tensor
    """Return why kernels cannot read the weights that torchao holds in a tensor, if so."""
    name = type(weight).__name__
    if not is_of_torchao(weight) or name not in (_BYTES, _FOUR_BITS):
        return "kernels read torchao's Int8WeightOnlyConfig and PrototypeInt4WeightOnlyConfig"
    is_of_bytes = name == _BYTES
    rounds = weight.act_quant_kwargs if is_of_bytes else weight.act_mapping_type
    reasons = {
        f"torchao computes in {weight.dtype}, kernels in {' and '.join(TYPES.values())}": (
            weight.dtype not in TYPES
        ),
        "torchao scales x before it multiplies": weight.act_pre_scale is not None,
        "torchao rounds x to bytes before it multiplies": rounds is not None,
        "they have scales for groups": is_of_bytes and not _is_by_rows(weight),
        "this CPU's order of packed weights is not known": not (is_of_bytes or can_be_read()),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _is_by_rows(weight: Any) -> bool:  # noqa: ANN401 - a tensor
    """Return whether each row of bytes has one scale, or all have; torchao reads no zero points."""
    n, k = weight.shape
    return weight.block_size[-1] == k and weight.scale.numel() in (1, n)


def _read(weight: Any) -> IntegerWeights:  # noqa: ANN401 - a tensor
    is_bytes = type(weight).__name__ == _BYTES
    n, k = weight.shape
    return IntegerWeights(
        dtype=weight.dtype,
        w_type="s8" if is_bytes else "u4",
        group=k if is_bytes else weight.block_size[-1],
        sizes=(n, k),
        held=parts_of(weight),
    )


def _column(scales: Any, n: int) -> Any:  # noqa: ANN401 - tensors
    """Return the scale of each row of w (n, 1), also where all rows have one."""
    return scales.to(torch.float32).reshape(-1, 1).expand(n, 1).contiguous()
