"""Where the arrays of a timing begin."""

import mmap

import numpy as np

from gemm_tuner.abi import ALIGNMENT_BYTES
from gemm_tuner.bench.placement import Placement
from gemm_tuner.machine.memory import HUGE_PAGE_BYTES, address_of

COUNT = 20


def _starts(process: int) -> list[int]:
    """Return how far from one array the next ones begin, within a page."""
    placement = Placement(process)
    arrays = [placement.allocate(1000) for _array in range(COUNT)]
    assert all(array.size == 1000 and not array.any() for array in arrays)
    assert all(address_of(array) % ALIGNMENT_BYTES == 0 for array in arrays)
    return [address_of(array) % mmap.PAGESIZE for array in arrays]


def test_small_arrays_begin_at_many_lines_of_a_page() -> None:
    assert len(set(_starts(0))) > COUNT / 4
    assert _starts(0) != _starts(1)


def test_large_arrays_begin_at_a_huge_page() -> None:
    array = Placement(3).allocate(HUGE_PAGE_BYTES)

    assert address_of(array) % HUGE_PAGE_BYTES == 0
    assert array.size == HUGE_PAGE_BYTES


def test_a_copy_holds_the_same_in_another_place() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)

    copy = Placement(1).copy(array)

    assert np.array_equal(copy, array)
    assert not np.shares_memory(copy, array)
