"""Arrays between guard pages: whoever reads or writes beside them, or changes them, is caught."""

import ctypes
import mmap
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.machine.memory import address_of, map_memory

GUARD_BYTES = 1 << 16

# All bits set is a NaN of every floating-point type, and one that no computation makes: what it
# stands in was never written. Among integers it is a common result, which another byte is not.
CANARY = np.uint8(0xFF)
INTEGER_CANARY = np.uint8(0xA5)

_PROT_NONE = 0
_PROT_READ = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Flush(StrEnum):
    """Which end of an array touches its guard page."""

    START = "start"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Addresses that must not be touched, or not be written."""

    name: str
    begin: int
    end: int


class GuardedMemory:
    """Memory between pages that nobody may touch, filled with canaries, as is what lies beside."""

    def __init__(
        self,
        name: str,
        size_bytes: int,
        *,
        flush: Flush,
        alignment_bytes: int,
        canary: np.uint8 = CANARY,
    ) -> None:
        """Reserve the memory; `flush` chooses the end that lies at the guard page.

        With `flush` at the end, up to `alignment_bytes` - 1 bytes lie between. Nothing guards the
        other end but canaries up to the next page: `find_stray_write` looks at them.
        """
        page = mmap.PAGESIZE
        pages_bytes = (max(size_bytes, 1) + page - 1) // page * page
        self._name = name
        self._canary = canary
        everything = np.frombuffer(map_memory(pages_bytes + 2 * GUARD_BYTES), np.uint8)
        base = address_of(everything)
        self._begin = base + GUARD_BYTES
        self._end = self._begin + pages_bytes
        slack = pages_bytes - size_bytes if flush is Flush.END else 0
        offset = slack // alignment_bytes * alignment_bytes
        pages = everything[GUARD_BYTES : GUARD_BYTES + pages_bytes]
        pages[:] = canary
        self.memory: NDArray[np.uint8] = pages[offset : offset + size_bytes]
        self._beside = {"before": pages[:offset], "after": pages[offset + size_bytes :]}
        self.regions = [
            Region(name=f"the guard page before {name}", begin=base, end=self._begin),
            Region(
                name=f"the guard page after {name}", begin=self._end, end=self._end + GUARD_BYTES
            ),
        ]
        _protect(base, GUARD_BYTES, _PROT_NONE)
        _protect(self._end, GUARD_BYTES, _PROT_NONE)

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return address_of(self.memory)

    def find_stray_write(self) -> str | None:
        """Return in words where something was written beside the memory, None if nothing was."""
        for side, canaries in self._beside.items():
            if np.any(canaries != self._canary):
                return f"wrote {side} {self._name}"
        return None

    def forbid_writing(self) -> None:
        """Make a write to the memory a fault from now on."""
        _protect(self._begin, self._end - self._begin, _PROT_READ)
        self.regions.append(
            Region(name=f"{self._name}, which is an input", begin=self._begin, end=self._end)
        )


class GuardedMatrix:
    """A matrix between guard pages, its rows `padding` elements apart, filled with canaries."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: np.dtype[np.generic],
        *,
        padding: int,
        flush: Flush,
    ) -> None:
        """Reserve the matrix; the last row has no padding, so that its end can touch the guard."""
        rows, columns = shape
        self.name = name
        self.leading_dimension = columns + padding
        elements = max(0, rows - 1) * self.leading_dimension + columns if rows else 0
        size = dtype.itemsize
        self._canary = INTEGER_CANARY if dtype.kind in "iu" else CANARY
        self._guarded = GuardedMemory(
            name, elements * size, flush=flush, alignment_bytes=size, canary=self._canary
        )
        self._row_bytes = self.leading_dimension * size
        self.values: NDArray[Any] = np.lib.stride_tricks.as_strided(
            self._guarded.memory.view(dtype), shape, (self._row_bytes, size)
        )

    @property
    def address(self) -> int:
        """Return the address of the first element."""
        return self._guarded.address

    @property
    def regions(self) -> list[Region]:
        """Return the addresses that must not be touched."""
        return self._guarded.regions

    def set_input(self, values: NDArray[Any]) -> None:
        """Fill the matrix, and make a write to it a fault from now on."""
        self.values[...] = values
        self._guarded.forbid_writing()

    def find_stray_write(self) -> str | None:
        """Return in words where something but an element was written, None if nothing was."""
        if np.any(self._padding() != self._canary):
            return f"wrote between the rows of {self.name}"
        return self._guarded.find_stray_write()

    def _padding(self) -> NDArray[np.uint8]:
        """Return the bytes between the rows."""
        rows = len(self.values)
        used_bytes = self.values.shape[1] * self.values.itemsize
        if self._row_bytes == used_bytes or rows < 2:
            return self._guarded.memory[:0]
        return np.lib.stride_tricks.as_strided(
            self._guarded.memory[used_bytes:],
            (rows - 1, self._row_bytes - used_bytes),
            (self._row_bytes, 1),
        )


def _protect(address: int, size_bytes: int, protection: int) -> None:
    if _libc.mprotect(address, size_bytes, protection) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")
