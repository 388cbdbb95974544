"""Files that someone else named: read without waiting, up to a bounded size, or written whole.

A pipe would make a reader wait, and a device would not end. Every file of a user or of a shared
place is read through here. What processes change in turn is locked here.
"""

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

LONGEST_LOCK_S = 5.0  # who holds a lock reads and writes a small file
_LOOK_S = 0.01
_MOST_LINKS = 40  # that Linux follows
_PERMISSIONS = 0o777  # without the bits that set a user or a group


def open_plain(path: Path, *, follows_links: bool = True) -> BinaryIO:
    """Return a plain file, open for reading.

    Raises:
        OSError: there is none, it is no plain file, or it cannot be read.
    """
    follow = 0 if follows_links else os.O_NOFOLLOW
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow)
    except ValueError as error:  # a null byte
        raise OSError(f"{str(path)!r} is not the name of a file: {error}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a plain file")
    return os.fdopen(handle, "rb")


def read_bounded(
    path: Path, limit_bytes: int, *, is_private: bool = False, follows_links: bool = True
) -> bytes:
    """Return the content of a plain file of at most `limit_bytes`.

    With `is_private`, it is no link, and nobody but this user owns, reads or writes it.

    Raises:
        OSError: there is none, or it is none of these, or it cannot be read.
    """
    with open_plain(path, follows_links=follows_links and not is_private) as file:
        status = os.fstat(file.fileno())
        if is_private and (status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077):
            raise OSError(f"others can read or write {path}; check it, then run chmod 600 on it")
        if status.st_size > limit_bytes:
            raise OSError(f"{path} is longer than {limit_bytes} bytes")
        content = file.read(limit_bytes + 1)  # it may have grown
        if len(content) > limit_bytes:
            raise OSError(f"{path} is longer than {limit_bytes} bytes")
        return content


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Write a file that a user named: all of it, or it stays as it was.

    What is no plain file, such as a pipe that somebody reads, is written as it is. So is a file
    that this process has open, where it is named as such, `/dev/stdout` or `/dev/fd/3`.

    Raises:
        OSError: it cannot be written, or nobody reads the pipe.
    """
    target = behind_links(path)
    if target.is_symlink():
        with os.fdopen(os.dup(int(target.name)), "wb") as file:  # goes on from where it stands
            yield file
        return
    if target.exists() and not target.is_file():
        pipe = os.open(target, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(pipe, True)
        with os.fdopen(pipe, "wb") as file:
            yield file
        return
    with _replacing(target, path) as file:
        yield file


@contextmanager
def _replacing(target: Path, name: Path) -> Iterator[BinaryIO]:
    """Write what takes the place of a plain file, or a new one; errors speak of it by `name`.

    It belongs to whoever writes it, so it sets nobody's user or group when it is run.
    """
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
    new = target.with_name(f".gemm-tuner-{secrets.token_hex(8)}")
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        error.filename = str(name)  # as somebody named it
        raise
    try:
        with os.fdopen(handle, "wb") as file:
            if target.exists():
                os.fchmod(handle, target.stat().st_mode & _PERMISSIONS)
            yield file
            file.flush()
            os.fsync(handle)
        new.replace(target)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise


def behind_links(path: Path) -> Path:
    """Return the file that a name leads to: a link only where it is what this process has open.

    Linux shows that as links, such as `/proc/self/fd/3`, to files that may have other names by now.

    Raises:
        OSError: its links lead in a circle, or it has a null byte, as no name has.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "no name of a file has a null byte", str(path))
    for _step in range(_MOST_LINKS):
        path = Path(os.path.realpath(path.parent)) / path.name
        if not path.is_symlink() or path.parent in _own_descriptors():
            return path
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _own_descriptors() -> tuple[Path, ...]:
    """Return the folders in which Linux lists what this process has open."""
    return tuple(Path(os.path.realpath(f"/proc/{who}/fd")) for who in ("self", "thread-self"))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes of this user, which is an empty file; others wait for it.

    A child that is forked meanwhile does not hold it.

    Raises:
        OSError: the file cannot be made, or somebody holds the lock for `LONGEST_LOCK_S`.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(path, flags, 0o600)
    try:
        _lock(lock, path)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child has the file open, too
        os.close(lock)


def _lock(lock: int, path: Path) -> None:
    until_s = time.monotonic() + LONGEST_LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                held = f"{path} is locked by a process that hangs; end it, then try again"
                raise OSError(errno.ETIMEDOUT, held) from None
            time.sleep(_LOOK_S)
        else:
            return
