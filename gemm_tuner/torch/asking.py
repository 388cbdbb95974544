"""What PyTorch computes with, and how what is asked for is called in words."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.rows import Rows
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer, WantedProduct
from gemm_tuner.machine.detect import detect_cpu

_MKL = "mkl"

# PyTorch prepares a call of oneDNN for some 6 µs, which smaller products do not gain.
LEAST_ONEDNN_FLOP = 4e6


def check_rows(name: str, rows: Collection[int | str]) -> None:
    """Check the numbers of rows that kernels are asked for, such as `[1, "2..64"]`.

    Raises:
        InvalidProblem: one is neither a number nor a range.
        InvalidSetting: `rows` is no list.
    """
    if isinstance(rows, str | int):
        raise InvalidSetting(f"{name} is {rows!r}; give a list, [{rows!r}].")
    for one in rows:
        Rows.parse(str(one))


def rows_up_to(count: int) -> tuple[int | str, ...]:
    """Return what to ask for where calls have up to so many rows: one, and to a power of two."""
    most = 1 << (count - 1).bit_length()
    return {1: (1,), 2: (1, 2)}.get(most, (1, f"2..{most}"))


def libraries_of_pytorch(dtype: str) -> tuple[str, ...]:
    """Return the libraries, by name, that compute products in PyTorch and not elsewhere."""
    return (_MKL,) if dtype == DType.F32.value and torch.backends.mkl.is_available() else ()


def is_left_to_mkl(dtype: str, flop: int, fastest: Collection[str]) -> bool:
    """Return whether PyTorch has MKL compute a product of which others were the `fastest`.

    Not where it is so small that to call oneDNN in its place gains nothing.

    On Intel's CPUs MKL may be faster than oneDNN, and a race without it does not know.
    """
    return (
        bool(fastest)
        and flop >= LEAST_ONEDNN_FLOP
        and _MKL not in fastest
        and _MKL in libraries_of_pytorch(dtype)
        and detect_cpu().vendor != "GenuineIntel"
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def without_old_kernels(found: FoundLayer) -> FoundLayer:
    """Return what there is for a layer, but kernels that cannot read zero points of floats."""
    kernels = found.kernels
    if all(one.takes_float_zero_points or not one.problem.has_zero_points for one in kernels):
        return found
    reason = "its kernels were built before they read zero points of floats; tune it again."
    return replace(found, kernels=(), reasons=(*found.reasons, reason))


def problem_text(wanted: WantedLayer, batch: Any = None) -> str:  # noqa: ANN401 - of PyTorch
    """Return the problem of a layer, a product or attention, and how many of them, in words."""
    rows = ",".join(map(str, wanted.rows))
    is_one = batch is None or (isinstance(batch, int) and batch == 1)
    many = "" if is_one else f"{batch} of "
    columns = wanted.columns if isinstance(wanted, WantedProduct) else wanted.n
    sizes = f"{rows}x{columns}x{wanted.k}"
    if isinstance(wanted, WantedProduct):
        is_attention = wanted.operation == Operation.ATTENTION.value  # whose keys lie one way
        layout = () if is_attention else (wanted.w_layout,)
        return many + " ".join((wanted.operation, wanted.dtype, sizes, *layout, wanted.epilogue))
    return f"{many}{wanted.dtype} {sizes} {wanted.epilogue}"
