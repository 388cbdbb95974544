"""Read files that someone else may have put there, without waiting, up to a bounded size."""

import os
import stat
from pathlib import Path


def read_bounded(path: Path, limit_bytes: int, *, is_private: bool = False) -> bytes | None:
    """Return the content of a plain file, or None if there is none.

    A pipe, a device, a link or a file of more than `limit_bytes` is not read: the first would make
    a reader wait, the second would not end.

    Raises:
        OSError: it is no plain file, is too long, cannot be read, or, with `is_private`, others
            than this user own, read or write it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a plain file")
        if is_private and (status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077):
            raise OSError(f"others can read or write {path}; check it, then run chmod 600 on it")
        content = file.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            raise OSError(f"{path} is longer than {limit_bytes} bytes")
        return content
