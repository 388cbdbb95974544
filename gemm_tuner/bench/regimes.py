"""Cache regimes: over how many copies of the weights the calls of a sample rotate."""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import ALIGNMENT_BYTES
from gemm_tuner.bench.drivers import WeightsStruct
from gemm_tuner.bench.placement import Placement
from gemm_tuner.bench.workload import Runner
from gemm_tuner.domain.context import Regime
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.machine.memory import address_of

# Enough that nearly every read comes from memory: on an AMD EPYC (family 26, L3 of 32 MiB,
# 2026-11-20) one core reads 62 GB/s from a block of 2 x L3, 48 from 4 x L3 and 41 from 8 x L3.
_COLD_TOTAL_OVER_L3 = 8
# Of a larger L3, which many cores share, less does: with 480 MiB, 10 GB/s from blocks of 1, 2 and
# 4 GiB alike (a Xeon of 2 cores, 2026-11-28), where fresh memory is touched at 0.2 GB/s.
_ENOUGH_COLD_BYTES = 1 << 30
_LEAST_TOTAL_OVER_L3 = 2
_LEAST_COLD_OVER_L3 = 2  # of each of several candidates, whose turns push out what it has read
_FASTEST_READ_BYTES_PER_NS = 64
_UNKNOWN_L3_BYTES = 32 << 20
_PUSHING_OVER_L3 = 4  # such a block always comes from memory, and leaves nothing else there
# Data about as large as L3 settles there slowly. On the same machine, after another block of the
# same size, a block of 32 MiB is read at 43 GB/s the first time, at 66 the fifth and at 90 from the
# 15th on. Half as much settles in four calls; four times as much always comes from memory.
_SETTLING_OVER_L3 = (0.5, 4.0)
_WARM_UP_NS = 10_000_000
_CALLS_TO_SETTLE = 4
_BLOCK_BYTES = 32 << 20  # copied in less than a second, also where memory is touched first


def cold_footprint_bytes(l3_bytes: int) -> int:
    """Return the size of a block that must be read from memory; 0 is an L3 of unknown size."""
    l3_bytes = l3_bytes or _UNKNOWN_L3_BYTES
    enough = max(_ENOUGH_COLD_BYTES, _LEAST_TOTAL_OVER_L3 * l3_bytes)
    return min(_COLD_TOTAL_OVER_L3 * l3_bytes, enough)


def copies_of_weights(
    regime: Regime, packed_bytes: int, l3_bytes: int, *, candidates: int = 1, sample_ns: int = 0
) -> int:
    """Return how many copies of the packed weights each runner needs in a regime.

    Between two uses of a cold copy, about as much is read as all copies of all `candidates`
    have, so those of several may be fewer; but no copy is read twice in a sample.
    """
    if regime is Regime.HOT or packed_bytes == 0:
        return 1
    all_bytes = cold_footprint_bytes(l3_bytes)
    least_bytes = _LEAST_COLD_OVER_L3 * all_bytes // _COLD_TOTAL_OVER_L3
    in_sample = _FASTEST_READ_BYTES_PER_NS * sample_ns
    bytes_of_one = min(all_bytes, max(all_bytes // candidates, least_bytes, in_sample))
    return max(2, -(-bytes_of_one // stride_of_copy(packed_bytes)))


class Copies(NamedTuple):
    """How many copies of its weights a runner has, and whether they are too few to be cold."""

    number: int
    are_few: bool = False


def copies_within(wanted: int, most: int | None) -> Copies:
    """Return as many copies as are wanted, or the most that a library can have; None is any number.

    Raises:
        BaselineMissing: it has one copy alone, which a sample cannot rotate over.
    """
    if most is None or wanted <= most:
        return Copies(wanted)
    if most == 1:
        raise BaselineMissing(
            "its calls cannot rotate over copies of the weights, so that these are cold; "
            "time it with hot weights."
        )
    return Copies(most, are_few=True)


class Pushing:
    """A block whose reading pushes all else out of the caches."""

    def __init__(self, l3_bytes: int, on_block: Callable[[], None] = lambda: None) -> None:
        """Touch it; 0 is an L3 of unknown size. `on_block` is called as the work goes on."""
        self._block = np.empty(pushing_bytes(l3_bytes) // 8, np.uint64)
        for first in range(0, self._block.size, _BLOCK_BYTES // 8):
            on_block()
            self._block[first : first + _BLOCK_BYTES // 8] = 1

    def read(self) -> None:
        """Read it once."""
        self._block.max()


def pushing_bytes(l3_bytes: int) -> int:
    """Return the size of a block that pushes all else out; 0 is an L3 of unknown size."""
    pushing = _PUSHING_OVER_L3 * (l3_bytes or _UNKNOWN_L3_BYTES)
    return min(pushing, cold_footprint_bytes(l3_bytes))


def warm_up_ns(regime: Regime, touched_bytes: int, l3_bytes: int) -> int:
    """Return how long calls that touch so many bytes go on until the caches hold what they can.

    0 stands for a call or two.
    """
    least, most = (int(share * (l3_bytes or _UNKNOWN_L3_BYTES)) for share in _SETTLING_OVER_L3)
    return _WARM_UP_NS if regime is Regime.HOT and least < touched_bytes < most else 0


def warm_up_calls(regime: Regime, all_bytes: int, l3_bytes: int) -> int:
    """Return how many calls at least stand before a sample, where all runners touch `all_bytes`."""
    pushed_out = all_bytes > _SETTLING_OVER_L3[0] * (l3_bytes or _UNKNOWN_L3_BYTES)
    return _CALLS_TO_SETTLE if regime is Regime.HOT and pushed_out else 1


class WeightCopies:
    """The packed weights of one runner, as often as its regime needs them, in random order.

    The order is random because the next layer of a model does not lie right behind this one.
    """

    def __init__(
        self,
        runner: Runner,
        copies: int,
        seed: int,
        on_block: Callable[[], None] = lambda: None,
        placement: Placement | None = None,
    ) -> None:
        """Pack the weights once and copy the result, or pack each copy where no other is right.

        `on_block` is called as the work goes on.
        """
        placement = placement or Placement()
        self.count = copies
        stride_bytes = stride_of_copy(runner.packed_weight_bytes)
        self._memory: NDArray[np.uint8] = placement.allocate(copies * stride_bytes)
        base = address_of(self._memory)
        runner.pack(base)
        rows = self._memory.reshape(copies, stride_bytes)
        rows_per_block = max(1, _BLOCK_BYTES // max(1, stride_bytes))
        for first in range(1, copies, rows_per_block):
            on_block()
            if runner.packs_each_copy:
                for copy in range(first, min(first + rows_per_block, copies)):
                    runner.pack(base + copy * stride_bytes)
            else:
                rows[first : first + rows_per_block] = rows[0]
        order = np.random.default_rng(seed).permutation(copies)
        self._addresses = (base + order * stride_bytes).astype(np.uint64)
        pointers = ctypes.cast(address_of(self._addresses), ctypes.POINTER(ctypes.c_void_p))
        self.struct = WeightsStruct(pointers, copies, 0)


def stride_of_copy(packed_bytes: int) -> int:
    """Return the distance between two copies, in bytes."""
    return -(-packed_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
