"""The types of elements as NumPy knows them. That of bf16 is of ml_dtypes."""

from typing import Any

import numpy as np

from gemm_tuner.domain.dtype import DType


class _NumpyTypes(dict[DType, np.dtype[Any]]):
    """A dictionary that loads ml_dtypes when it is asked for bf16: release 0.7 takes 0.4 s."""

    def __missing__(self, dtype: DType) -> np.dtype[Any]:
        import ml_dtypes  # noqa: PLC0415 - slow to load

        own: dict[DType, np.dtype[Any]] = {DType.BF16: np.dtype(ml_dtypes.bfloat16)}
        self[dtype] = own[dtype]
        return own[dtype]


NUMPY_TYPES = _NumpyTypes(
    {
        DType.F32: np.dtype(np.float32),
        DType.F16: np.dtype(np.float16),
        DType.S32: np.dtype(np.int32),
        DType.S8: np.dtype(np.int8),
        DType.U8: np.dtype(np.uint8),
        # Bytes of two elements.
        DType.S4: np.dtype(np.uint8),
        DType.U4: np.dtype(np.uint8),
    }
)


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Return whether a type is that of bf16, without loading that."""
    return dtype.type.__name__ == "bfloat16"
