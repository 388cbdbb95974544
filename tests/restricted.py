"""Where nothing can be written: processes that obey permissions, and full disks."""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


def obeying_permissions(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` bound by the modes of files, also for root."""
    if os.getuid():
        return list(command)
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]


@contextmanager
def full_disk(size_bytes: int = 0) -> Iterator[None]:
    """Let no file of this process grow beyond a size.

    Python keeps what it compiles without looking whether all of that was written: not now.
    """
    limits, keeps_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = keeps_none


# What a kernel, its settings or a container say, and a fault of the sandbox does not.
_LINUX_SAYS = (
    "Operation not permitted",
    "Permission denied",
    "Function not implemented",
    "unshare: No space left on device",
    "Landlock is off",
)


def skip_where_linux_refuses(why: str) -> None:
    """Skip a test of the sandbox where Linux does not permit it; any other reason is a failure."""
    if any(said in why for said in _LINUX_SAYS):
        pytest.skip(f"Linux refuses this sandbox: {why.strip()}")
    pytest.fail(f"the sandbox is not entered: {why}")


class SmallDisk:
    """A file system of its own, in memory, that can be filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, but_bytes: int) -> None:
        """Take all space but so much."""
        free = os.statvfs(self.folder)
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize - but_bytes)

    def empty(self) -> None:
        """Give the space back."""
        self._filler.unlink()


@contextmanager
def small_disk(size_bytes: int) -> Iterator[SmallDisk]:
    """Mount a file system of so many bytes, or skip the test where that is not permitted."""
    with tempfile.TemporaryDirectory(prefix="gemm-tuner-disk-") as name:
        options = f"size={size_bytes},mode=0755"
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", name]
        umount = ["umount", "--lazy", name]
        if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("no file system may be mounted here")
        try:
            Path(name).chmod(0o755)
            yield SmallDisk(Path(name))
        finally:
            subprocess.run(umount, check=True)
