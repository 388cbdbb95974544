"""How much memory a trial may take."""

import resource
from pathlib import Path

from gemm_tuner.errors import NotEnoughMemory

_KEEP_FREE = 0.1
_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def check_memory(needed_bytes: int, purpose: str) -> None:
    """Check that memory for `purpose` is there, before the system starts to end processes.

    Raises:
        NotEnoughMemory: it is not.
    """
    available_bytes = available_memory_bytes()
    if needed_bytes > (1 - _KEEP_FREE) * available_bytes:
        raise NotEnoughMemory(
            f"{purpose} takes {needed_bytes / 2**30:.1f} GiB, but {available_bytes / 2**30:.1f} "
            "GiB of memory are available to this process; choose smaller sizes, raise its limits "
            "(control group, ulimit -v), or take a larger machine."
        )


def available_memory_bytes() -> int:
    """Return the memory available to this process.

    That is what is left of the machine, in its control group, and of its address space (ulimit -v).
    """
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    machine = next(int(words[1]) << 10 for words in fields if words[0] == "MemAvailable:")
    left = [
        _read_number(limit) - _read_number(used)
        for limit, used in _LIMITS
        if _read_number(limit) > 0
    ]
    most_addresses, _hard = resource.getrlimit(resource.RLIMIT_AS)
    if most_addresses != resource.RLIM_INFINITY:
        used_pages = int(Path("/proc/self/statm").read_text().split()[0])
        left.append(most_addresses - used_pages * resource.getpagesize())
    return max(0, min([machine, *left]))


def _read_number(path: str) -> int:
    """Return the number in a file, 0 if there is none."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0
