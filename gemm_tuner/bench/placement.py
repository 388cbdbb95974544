"""Where the arrays of a timing begin: in each of several processes elsewhere.

Arrays whose addresses agree in their last bits get into each other's way in the first cache and
among the loads that wait for stores. A process that is forked for a timing lays out its memory as
the one before did, so each draws where in a page its arrays begin.
"""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import ALIGNMENT_BYTES
from gemm_tuner.machine.memory import HUGE_PAGE_BYTES, allocate_aligned


class Placement:
    """Allocates the arrays of the process with this number."""

    def __init__(self, process: int = 0) -> None:
        """Draw where arrays will begin."""
        self._dice = np.random.default_rng(process)

    def allocate(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return zeroed memory that starts at a cache line; large memory at a huge page."""
        if size_bytes >= HUGE_PAGE_BYTES:
            return allocate_aligned(size_bytes)
        lines = int(self._dice.integers(mmap.PAGESIZE // ALIGNMENT_BYTES))
        start = lines * ALIGNMENT_BYTES
        return allocate_aligned(mmap.PAGESIZE + size_bytes)[start : start + size_bytes]

    def copy(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a dense copy of an array."""
        copy = self.allocate(array.nbytes).view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy
