"""Where nothing can be written: processes that obey permissions, and full disks."""

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def obeying_permissions(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` bound by the modes of files, also for root."""
    if os.getuid():
        return list(command)
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]


@contextmanager
def full_disk(size_bytes: int = 0) -> Iterator[None]:
    """Let no file of this process grow beyond a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
