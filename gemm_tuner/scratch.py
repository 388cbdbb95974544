"""Folders to work in for a while: removed at the end, or by the next one if a process was killed.

In each is a file that its process holds a lock of. The lock ends with the process, however that
ends.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gemm_tuner.files import open_plain

_LOCK_NAME = ".lock"


@contextmanager
def scratch_folder(
    prefix: str,
    *,
    parent: Path | None = None,
    before_removal: Callable[[Path], None] = lambda _left: None,
) -> Iterator[Path]:
    """Yield a new folder, and remove it in the end.

    What processes of this user that were killed have left is removed first.

    Args:
        prefix: how the names of such folders begin, and of no others.
        parent: where it is made, by default the folder for temporary files.
        before_removal: called with each folder that was left before it is removed.

    Raises:
        OSError: it cannot be made.
    """
    _remove_left_behind(prefix, parent or Path(tempfile.gettempdir()), before_removal)
    made = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    with made as name, _locked(Path(name)):
        yield Path(name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, whose file is never seen there unlocked."""
    unlocked = folder / f"{_LOCK_NAME}.new"
    with unlocked.open("wb") as lock:
        with suppress(OSError):  # there are file systems without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.replace(folder / _LOCK_NAME)
        yield


def _remove_left_behind(prefix: str, parent: Path, before_removal: Callable[[Path], None]) -> None:
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with suppress(OSError):  # in use, just removed, or no such folder
                if entry.name.startswith(prefix) and _is_own_folder(entry):
                    _remove_unlocked(Path(entry.path), before_removal)


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _remove_unlocked(folder: Path, before_removal: Callable[[Path], None]) -> None:
    """Remove a folder that no process holds the lock of.

    Raises:
        OSError: one does, or there is no lock.
    """
    with open_plain(folder / _LOCK_NAME, follows_links=False) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        before_removal(folder)
        shutil.rmtree(folder)
