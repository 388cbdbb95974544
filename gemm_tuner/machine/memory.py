"""Memory aligned for vectors, in huge pages where it is large."""

import mmap
from contextlib import suppress
from threading import local

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import ALIGNMENT_BYTES

HUGE_PAGE_BYTES = 2 << 20


def allocate_aligned(size_bytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory that starts at a cache line, or at a huge page if it fills one."""
    if size_bytes < HUGE_PAGE_BYTES:
        return _from_boundary(np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8), ALIGNMENT_BYTES)[
            :size_bytes
        ]
    mapping = map_memory(size_bytes + HUGE_PAGE_BYTES)
    return _from_boundary(np.frombuffer(mapping, np.uint8), HUGE_PAGE_BYTES)[:size_bytes]


def map_memory(size_bytes: int) -> mmap.mmap:
    """Return zeroed private pages: huge ones if the size fills one and the system has them."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE)
    if size_bytes >= HUGE_PAGE_BYTES:
        # Linux without huge pages refuses the advice; small pages work, too.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class ThreadMemory(local):
    """Memory of each thread, kept between its calls: new pages take as long as a small product."""

    def __init__(self) -> None:
        """Begin with none."""
        self._kept = np.empty(0, np.uint8)

    def get(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return so many bytes, aligned, with whatever the last call left in them."""
        if self._kept.size < size_bytes:
            self._kept = allocate_aligned(size_bytes)
        return self._kept[:size_bytes]


def address_of(array: NDArray[np.generic]) -> int:
    """Return the address of the first element."""
    address: int = array.__array_interface__["data"][0]
    return address


def _from_boundary(memory: NDArray[np.uint8], boundary_bytes: int) -> NDArray[np.uint8]:
    return memory[-address_of(memory) % boundary_bytes :]
