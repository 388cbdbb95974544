"""Expressions for error messages: how a caller turns an array into one that a kernel takes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.dlpack import library_of

_OF_TORCH = "torch"


def converted(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> str:
    """Return the expression for an array with the elements of another type."""
    if library_of(array) == _OF_TORCH:
        return f"{name}.to(torch.{dtype.name})"
    module = "numpy" if dtype.isbuiltin == 1 else "ml_dtypes"
    return f"{name}.astype({module}.{dtype.name})"


def contiguous(name: str, array: NDArray[Any]) -> str:
    """Return the expression for an array whose elements lie one behind the other."""
    if library_of(array) == _OF_TORCH:
        return f"{name}.contiguous()"
    return f"numpy.ascontiguousarray({name})"


def copied(name: str, array: NDArray[Any]) -> str:
    """Return the expression for an array in memory of its own."""
    return f"{name}.{'clone' if library_of(array) == _OF_TORCH else 'copy'}()"
