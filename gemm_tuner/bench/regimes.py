"""Cache regimes: over how many copies of the weights the calls of a sample rotate."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.drivers import WeightsStruct
from gemm_tuner.bench.workload import Callee
from gemm_tuner.domain.context import Regime
from gemm_tuner.runtime.abi import ALIGNMENT_BYTES
from gemm_tuner.runtime.memory import address_of, allocate_aligned

# Enough to push every copy out of the caches before its turn comes again, and an end to it on
# machines whose last-level cache is very large.
_COLD_TOTAL_OVER_L3 = 2
_COLD_TOTAL_MAX_BYTES = 256 << 20
_UNKNOWN_L3_BYTES = 64 << 20


def copies_of_weights(regime: Regime, packed_bytes: int, l3_bytes: int) -> int:
    """Return how many copies of the packed weights a regime needs."""
    if regime is Regime.HOT or packed_bytes == 0:
        return 1
    total_bytes = _COLD_TOTAL_OVER_L3 * (l3_bytes or _UNKNOWN_L3_BYTES)
    return max(2, -(-min(total_bytes, _COLD_TOTAL_MAX_BYTES) // packed_bytes))


class WeightCopies:
    """The packed weights of one callee, as often as its regime needs them, in random order.

    The order is random because the next layer of a model does not lie right behind this one.
    """

    def __init__(self, callee: Callee, copies: int, seed: int) -> None:
        """Pack the weights once and copy the result."""
        stride_bytes = stride_of_copy(callee.packed_weight_bytes)
        self._memory: NDArray[np.uint8] = allocate_aligned(copies * stride_bytes)
        base = address_of(self._memory)
        callee.pack(base)
        self._memory.reshape(copies, stride_bytes)[1:] = self._memory[:stride_bytes]
        order = np.random.default_rng(seed).permutation(copies)
        self._addresses = (base + order * stride_bytes).astype(np.uint64)
        pointers = ctypes.cast(address_of(self._addresses), ctypes.POINTER(ctypes.c_void_p))
        self.struct = WeightsStruct(pointers, copies, 0)


def stride_of_copy(packed_bytes: int) -> int:
    """Return the distance between two copies, in bytes."""
    return -(-packed_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
