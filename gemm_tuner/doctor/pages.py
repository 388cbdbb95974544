"""The check of huge pages, in which large packed weights lie where the system has them."""

import os

from gemm_tuner.domain.check import Check, Figure, Level
from gemm_tuner.machine.memory import HUGE_PAGE_BYTES
from gemm_tuner.machine.system import SystemFiles

_MODE = "sys/kernel/mm/transparent_hugepage/enabled"
_FEW = 64  # 128 MiB: the packed weights of a large layer


def check_huge_pages(files: SystemFiles) -> Check:
    """Say whether memory lies in huge pages, and how many are free."""
    text = files.read(_MODE)
    mode = (text or "").partition("[")[2].partition("]")[0]
    if not mode:
        return Check.unknown("huge pages", f"{files.path(_MODE)} does not tell")
    free = _free_blocks(files)
    memory = files.fields("proc/meminfo")
    reserved = memory.get("HugePages_Total", "0")
    seen = f"transparent: {mode}; " + (
        "not known: how many are free" if free is None else f"{free} free of 2 MiB"
    )
    if reserved not in {"", "0"}:
        seen += f"; {reserved} reserved ones, which gemm-tuner does not use"
    figures: dict[str, Figure] = {"transparent": mode, "free_blocks_of_2_mib": free}
    if mode == "never":
        return Check(
            name="huge pages",
            level=Level.NOTE,
            seen=seen,
            advice=f"for fewer misses in large weights, run as root: echo madvise > /{_MODE}",
            figures=figures,
        )
    if free is not None and free < _FEW:
        return Check(
            name="huge pages",
            level=Level.NOTE,
            seen=seen,
            advice="free some memory, or run as root: echo 1 > /proc/sys/vm/compact_memory",
            figures=figures,
        )
    return Check(name="huge pages", level=Level.OK, seen=seen, figures=figures)


def _free_blocks(files: SystemFiles) -> int | None:
    """Return how many blocks as large as a huge page are free, None if it is not known.

    In a line of /proc/buddyinfo, the n-th number counts free blocks of 2^n pages.
    """
    text = files.read("proc/buddyinfo")
    if not text:
        return None
    order = (HUGE_PAGE_BYTES // os.sysconf("SC_PAGE_SIZE")).bit_length() - 1
    free = 0
    for line in text.splitlines():
        counts = line.partition("zone")[2].split()[1:]
        if not all(count.isdecimal() for count in counts):
            return None
        free += sum(int(count) << (n - order) for n, count in enumerate(counts) if n >= order)
    return free
