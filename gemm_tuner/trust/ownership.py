"""Check that nobody else can change the database or the key of a service."""

import os
import stat
from pathlib import Path

from gemm_tuner.errors import InvalidSetting

_ROOT_UID = 0


def check_owned(file: Path) -> None:
    """Check that only this user and root can write a file, or put another in its place.

    Raises:
        InvalidSetting: others own or can write the file or its folder.
    """
    for path in (file.resolve(), file.resolve().parent):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        mode = stat.S_IMODE(status.st_mode)
        # In a folder such as /tmp anyone can make files, but remove only their own.
        is_shared = mode & 0o022 and not (path.is_dir() and mode & stat.S_ISVTX)
        if status.st_uid not in {os.getuid(), _ROOT_UID} or is_shared:
            raise InvalidSetting(
                f"{path} can be changed by other users, and what is served could then be theirs; "
                f"check what it holds, then run: chmod go-w {path} as its owner, "
                "or name a place of yours."
            )
