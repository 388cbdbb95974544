"""Folders to work in for a while: removed at the end, or by the next one if a process was killed.

In each is a file that its process holds a lock of. The lock ends with the process, however that
ends.
"""

import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from gemm_tuner.files import open_plain

_LOCK_NAME = ".gemm-tuner-lock"
_RANDOM_NAME = re.compile("[a-z0-9_]{8}")  # what mkdtemp puts behind a prefix
_FORGOTTEN_S = 86_400.0


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
        prefix: how the names of such folders begin.
        parent: where it is made, by default the folder for temporary files.
        before_removal: called with each folder that was left before it is removed.

    Raises:
        OSError: it cannot be made.
    """
    _remove_left_behind(prefix, parent or Path(tempfile.gettempdir()), before_removal)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with _locked(made):
        try:
            yield made
        finally:
            with suppress(OSError):  # the next one tries again
                _remove(made)


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
                if _is_own_folder(entry, prefix):
                    _remove_unlocked(Path(entry.path), before_removal)


def _is_own_folder(entry: os.DirEntry[str], prefix: str) -> bool:
    name = entry.name.removeprefix(prefix)
    if name == entry.name or not _RANDOM_NAME.fullmatch(name):
        return False
    status = entry.stat(follow_symlinks=False)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _remove_unlocked(folder: Path, before_removal: Callable[[Path], None]) -> None:
    """Remove a folder that no process holds the lock of.

    Without a lock, it is one that is being made or removed, or whose process was killed while it
    did that: after a day, it was killed.

    Raises:
        OSError: it is in use, or cannot be removed.
    """
    changed_at = folder.stat().st_mtime
    try:
        lock = open_plain(folder / _LOCK_NAME, follows_links=False)
    except FileNotFoundError:
        if time.time() - changed_at < _FORGOTTEN_S:
            return
        before_removal(folder)
        _remove(folder)
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        before_removal(folder)
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder however deep it is, the lock last: it says whose the rest is.

    Subfolders are moved up before they are emptied: no path is long, and nothing is recursive.

    Raises:
        OSError: something in it cannot be removed.
    """
    top = _open_folder(str(folder), None)
    try:
        inner = _empty(top, top)
        while inner:
            name = inner.pop()
            opened = _open_folder(name, top)
            try:
                inner += _empty(opened, top)
            finally:
                os.close(opened)
            os.rmdir(name, dir_fd=top)
        with suppress(FileNotFoundError):
            os.unlink(_LOCK_NAME, dir_fd=top)
    finally:
        os.close(top)
    folder.rmdir()


def _empty(folder: int, top: int) -> list[str]:
    """Remove the files of a folder but the lock, and return its subfolders, moved to `top`."""
    inner = []
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                inner.append(entry.name if folder == top else _move_up(entry.name, folder, top))
            elif folder != top or entry.name != _LOCK_NAME:
                os.unlink(entry.name, dir_fd=folder)
    return inner


def _move_up(name: str, folder: int, top: int) -> str:
    os.close(_open_folder(name, folder))  # one that cannot be written cannot be moved
    moved = uuid4().hex
    os.rename(name, moved, src_dir_fd=folder, dst_dir_fd=top)
    return moved


def _open_folder(name: str, within: int | None) -> int:
    """Return a descriptor of a folder, not behind a link, whose owner may do all with it."""
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        with suppress(OSError):
            Path(f"/proc/self/fd/{place}").chmod(stat.S_IRWXU)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
    finally:
        os.close(place)
