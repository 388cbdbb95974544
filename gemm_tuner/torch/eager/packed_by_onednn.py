"""A linear layer in f32 that oneDNN computes, where PyTorch would call MKL, in eager mode."""

import math
from typing import Any

import torch

from gemm_tuner.domain.rows import Rows
from gemm_tuner.torch.asking import LEAST_ONEDNN_FLOP
from gemm_tuner.torch.eager.tuned_linear import PackedLayer, note_memory
from gemm_tuner.torch.operators import BY_ONEDNN


class PackedByOneDnn(PackedLayer):
    """The weights of one layer as oneDNN packs them, for calls that are not too small."""

    def __post_init__(self) -> None:
        """Leave calls alone that PyTorch prepares for longer than oneDNN saves."""
        sizes = self.wanted.n * self.wanted.k
        self.least = math.ceil(LEAST_ONEDNN_FLOP / (2 * sizes)) * self.wanted.k

    def __reduce__(self) -> tuple[object, ...]:
        """Return what packs the weights again in another process, which asks for nothing."""
        return type(self), (self.wanted, None)

    def _pack(self, weight: Any) -> tuple[Any, int] | None:  # noqa: ANN401 - a tensor
        rows = self.rows_of(weight.detach())
        is_plain = type(weight) is torch.nn.Parameter and weight.is_cpu
        if not is_plain or weight.dtype is not torch.float32 or not rows.numel():
            return None
        note_memory(weight)
        most = max(Rows.parse(str(one)).high for one in self.wanted.rows)
        with torch.no_grad():
            return torch.ops.gemm_tuner.onednn_pack(rows.contiguous(), most), BY_ONEDNN
