"""One process of a user measures on a machine at a time: two would disturb each other."""

import fcntl
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from platformdirs import user_data_path

from gemm_tuner.errors import PreparationStopped, StoreFailed
from gemm_tuner.machine.forks import tell_of_forks
from gemm_tuner.machine.system_text import system_text

_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5
_TELL_EVERY_S = 60.0

_holds_lock = ContextVar("holds_lock", default=False)
_waits_until_s = ContextVar("waits_until_s", default=math.inf)  # by time.monotonic()


@contextmanager
def measuring(
    is_stopped: Callable[[], bool] = lambda: False,
    on_wait: Callable[[str], None] = _LOG.info,
) -> Iterator[None]:
    """Keep other threads and processes of this user from measuring while the context is open.

    It waits for one that does, and tells who it is by `on_wait`, now and then. Whoever measures may
    open it again in the same thread.

    Raises:
        PreparationStopped: it `is_stopped` while another measures, or has waited long enough.
        StoreFailed: the file of the lock cannot be made or locked.
    """
    if _holds_lock.get():
        yield
        return
    lock = MeasuringLock()
    _wait_for(lock, is_stopped, on_wait)
    try:
        with as_holder():
            yield
    finally:
        lock.release()


def _wait_for(
    lock: "MeasuringLock", is_stopped: Callable[[], bool], on_wait: Callable[[str], None]
) -> None:
    told_s = -_TELL_EVERY_S
    while not lock.acquire():
        if is_stopped() or is_time_over():
            raise PreparationStopped(f"stopped while it was waiting for {lock.holder_text()}.")
        if time.monotonic() - told_s >= _TELL_EVERY_S:
            on_wait(f"waiting for {lock.holder_text()}")
            told_s = time.monotonic()
        time.sleep(_LOOK_EVERY_S)


@contextmanager
def waiting_at_most(seconds: float) -> Iterator[None]:
    """Let this thread wait for others that measure until so many seconds from now, if at all."""
    before = _waits_until_s.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _waits_until_s.reset(before)


def is_time_over() -> bool:
    """Return whether the time is over that this thread may wait for others."""
    return time.monotonic() >= _waits_until_s.get()


@contextmanager
def as_holder() -> Iterator[None]:
    """Let this thread measure: it holds the lock, or the process that waits for this one does."""
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


class MeasuringLock:
    """A lock of this user on this machine, which ends with the process that holds it."""

    def __init__(self, path: Path | None = None) -> None:
        """Name the file of the lock; by default one of this machine in the user's data folder."""
        # Folders may be shared by machines, and each measures for itself.
        machine = re.sub(r"[^\w.-]", "_", os.uname().nodename)
        self._path = path or user_data_path("gemm-tuner") / f"measuring-{machine}.lock"
        self._descriptor: int | None = None
        tell_of_forks(self)

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
            is_there = os.path.lexists(self._path)
            what = "remove what is there" if is_there else "make its folder writable"
            raise StoreFailed(
                f"{self._path} cannot be made ({error.strerror}): without it, two processes would "
                f"measure at once; {what}."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another holds it
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            raise StoreFailed(
                f"{self._path} cannot be locked ({error.strerror}): without it, two processes "
                "would measure at once; set XDG_DATA_HOME to a folder on a local disk."
            ) from error
        self._descriptor = descriptor
        return True

    def holder_text(self) -> str:
        """Say who measures: what holds the lock, as far as Linux tells."""
        try:
            holder = holder_of(self._path.stat().st_ino, system_text(Path("/proc/locks")))
        except OSError:
            holder = None
        if holder == str(os.getpid()):
            return "another thread of this program, which measures"
        if holder is None:
            return "another process of yours, which measures"
        return f"process {holder} of yours, which measures"

    def release(self) -> None:
        """Let another process measure."""
        if self._descriptor is not None:
            # A child that was forked meanwhile may still have the file open, and so the lock.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.after_fork()

    def after_fork(self) -> None:
        """Leave the lock to the parent, in a child that was forked while it was held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


# A child that is forked by who measures does not measure with it.
os.register_at_fork(after_in_child=lambda: _holds_lock.set(False))
