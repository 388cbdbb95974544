"""One process of a user measures on a machine at a time: two would disturb each other."""

import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from platformdirs import user_data_path

from gemm_tuner.errors import StoreFailed
from gemm_tuner.machine.system_text import system_text

_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5

_holds_lock = ContextVar("holds_lock", default=False)


@contextmanager
def measuring(
    is_stopped: Callable[[], bool] = lambda: False,
    on_wait: Callable[[str], None] = _LOG.info,
) -> Iterator[None]:
    """Keep other threads and processes of this user from measuring while the context is open.

    It waits for one that does, and says so by `on_wait`, until `is_stopped`. Whoever measures may
    open it again, and so may the processes that it started.

    Raises:
        StoreFailed: the file of the lock cannot be made.
    """
    if _holds_lock.get():
        yield
        return
    lock = MeasuringLock()
    if not lock.acquire():
        holder = lock.holder()
        if holder is not None and holder in _ancestors():
            with as_holder():
                yield
            return
        on_wait("Waiting for another process of yours that measures on this machine.")
        while not is_stopped() and not lock.acquire():
            time.sleep(_LOOK_EVERY_S)
    try:
        with as_holder():
            yield
    finally:
        lock.release()


@contextmanager
def as_holder() -> Iterator[None]:
    """Let this thread measure: it holds the lock."""
    before = _holds_lock.set(True)
    try:
        yield
    finally:
        _holds_lock.reset(before)


def holder_of(inode: int, locks: str) -> str | None:
    """Return the id of the process that locks a file, as text, None if the system does not tell.

    `locks` is the text of /proc/locks.
    """
    for line in locks.splitlines():
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode):
            return words[4]
    return None


def _ancestors() -> Iterator[str]:
    """Yield the ids of the processes that started this one, the nearest first."""
    status = Path("/proc/self/status")
    while parent := re.search(r"^PPid:\s*([1-9]\d*)", system_text(status), re.MULTILINE):
        yield parent[1]
        status = Path(f"/proc/{parent[1]}/status")


class MeasuringLock:
    """A lock of this user on this machine, which ends with the process that holds it."""

    def __init__(self, path: Path | None = None) -> None:
        """Name the file of the lock; by default one of this machine in the user's data folder."""
        # Folders may be shared by machines, and each measures for itself.
        machine = re.sub(r"[^\w.-]", "_", os.uname().nodename)
        self._path = path or user_data_path("gemm-tuner") / f"measuring-{machine}.lock"
        self._descriptor: int | None = None

    @property
    def path(self) -> Path:
        """Return the file of the lock."""
        return self._path

    def acquire(self) -> bool:
        """Return whether this process holds the lock now; do not wait for it.

        Raises:
            StoreFailed: the file cannot be made.
        """
        if self._descriptor is not None:
            return True
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise StoreFailed(
                f"{self._path} cannot be made ({error.strerror}): without it, two processes would "
                "measure at once; make its folder writable."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another holds it
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def holder(self) -> str | None:
        """Return the id of the process that holds the lock, None where that is not known."""
        try:
            return holder_of(self._path.stat().st_ino, system_text(Path("/proc/locks")))
        except OSError:
            return None

    def release(self) -> None:
        """Let another process measure."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
