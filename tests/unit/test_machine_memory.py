"""Memory for packed weights: its alignment, and the pages it lies in."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gemm_tuner.machine.memory import (
    HUGE_PAGE_BYTES,
    ThreadMemory,
    address_of,
    allocate_aligned,
)

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SIZE_BYTES = 8 * HUGE_PAGE_BYTES + 4096


def test_small_memory_starts_at_a_cache_line() -> None:
    assert address_of(allocate_aligned(1000)) % 64 == 0


def test_a_thread_gets_the_same_memory_again_and_no_other_has_it() -> None:
    memory = ThreadMemory()
    first = memory.get(1000)

    again = memory.get(500)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(memory.get, 500).result()

    assert address_of(first) == address_of(again)
    assert again.size == other.size == 500
    assert not np.shares_memory(first, other)
    assert memory.get(2000).size == 2000


def test_large_memory_starts_at_a_huge_page() -> None:
    assert address_of(allocate_aligned(_SIZE_BYTES)) % HUGE_PAGE_BYTES == 0


@pytest.mark.skipif(
    not _THP.exists() or "[never]" in _THP.read_text(), reason="this system has no huge pages"
)
def test_large_memory_lies_in_huge_pages() -> None:
    memory = allocate_aligned(_SIZE_BYTES)

    memory[:] = 1

    assert _huge_bytes(address_of(memory)) >= 7 * HUGE_PAGE_BYTES


def _huge_bytes(address: int) -> int:
    """Return how much of the mapping that holds `address` lies in huge pages, in bytes."""
    holds_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *words = line.split()
        if "-" in first and not first.endswith(":"):
            low, high = (int(bound, 16) for bound in first.split("-"))
            holds_it = low <= address < high
        elif holds_it and first == "AnonHugePages:":
            return int(words[0]) << 10
    return 0


def test_memory_is_that_of_the_address_space_where_it_is_limited() -> None:
    code = (
        "from gemm_tuner.machine.available_memory import available_memory_bytes\n"
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "print(available_memory_bytes())\n"
    )

    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert 0 < int(told.stdout) < 1 << 30
