"""A linear layer in f32 that oneDNN computes, where PyTorch would call MKL, in eager mode."""

from typing import Any

import torch

from gemm_tuner.domain.rows import Rows
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.layers.wanted import WantedLayer
from gemm_tuner.torch.asking import is_left_to_mkl
from gemm_tuner.torch.eager.tuned_linear import PackedLayer, note_memory, warn_of_plain
from gemm_tuner.torch.operators import BY_ONEDNN, library


def rows_by_onednn(wanted: WantedLayer, fastest: tuple[str, ...]) -> frozenset[int]:
    """Return the numbers of rows for which oneDNN shall compute a layer that others than MKL won.

    None of a range: for each number of rows, oneDNN keeps what it prepared.
    """
    numbers = (Rows.parse(str(one)) for one in wanted.rows)
    return frozenset(
        one.high
        for one in numbers
        if one.low == one.high
        and is_left_to_mkl(wanted.dtype, 2 * one.high * wanted.n * wanted.k, fastest)
    )


class PackedByOneDnn(PackedLayer):
    """The weights of one layer as oneDNN packs them, for the `rows_taken`."""

    rows_taken: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Learn for which inputs oneDNN is called."""
        self.rows_taken = rows_by_onednn(self.wanted, ("onednn",))
        self.least = min(self.rows_taken, default=0) * self.wanted.k
        self.most = max(self.rows_taken, default=0) * self.wanted.k

    def __reduce__(self) -> tuple[object, ...]:
        """Return what packs the weights again in another process, which asks for nothing."""
        return type(self), (self.wanted, None, None, True, None, self.module_class)

    def has_kernel(self, x: Any) -> bool:  # noqa: ANN401 - a tensor
        """Return whether oneDNN computes as many rows as x has."""
        return x.numel() // self.wanted.k in self.rows_taken

    def _pack(self, weight: Any) -> tuple[Any, int] | None:  # noqa: ANN401 - a tensor
        rows = self.rows_of(weight.detach())
        is_plain = type(weight) is torch.nn.Parameter and weight.is_cpu
        is_f32 = weight.dtype is torch.float32
        if not (self.rows_taken and is_plain and is_f32 and rows.numel()):
            return None  # such as of a copy on another CPU
        try:
            library()  # which another process may have built
        except GemmTunerError as error:
            warn_of_plain(str(error))
            return None
        note_memory(weight)
        with torch.no_grad():
            packed = torch.ops.gemm_tuner.onednn_pack(rows.contiguous(), max(self.rows_taken))
        return packed, BY_ONEDNN
