"""Check that nobody else can change the database or the key of a service."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gemm_tuner.errors import InvalidSetting

_ROOT_UID = 0
_MAX_LINKS = 40  # that Linux follows


def check_owned(file: Path, *, is_database: bool = False) -> None:
    """Check that only this user and root can write a file, or put another in its place.

    The same holds of each link on the way to it. In a folder such as /tmp anyone can make files,
    but remove only their own: a database there could be given a journal by others.

    Raises:
        InvalidSetting: others own or can write the file, a link to it, or the folder of one.
    """
    for link in _links(file):
        _check(link)
        _check(link.parent)
    path = Path(os.path.realpath(file))  # of links in a circle, one of them
    _check(path)
    _check(path.parent)
    if is_database and _is_sticky(path.parent):
        raise InvalidSetting(
            f"others can make files in {path.parent}, and so a journal that would change the "
            f"database {path.name} there; move it into a folder of yours."
        )


def _links(file: Path) -> Iterator[Path]:
    """Yield the links on the way to a file: of its folders, and its own."""
    path = file.absolute()
    for _step in range(_MAX_LINKS):
        link = next((one for one in (*reversed(path.parents), path) if one.is_symlink()), None)
        if link is None:
            return
        yield link
        path = link.parent / link.readlink() / path.relative_to(link)


def _check(path: Path) -> None:
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    mode = 0 if stat.S_ISLNK(status.st_mode) else stat.S_IMODE(status.st_mode)
    is_shared = mode & 0o022 and not _is_sticky(path)
    if status.st_uid not in {os.getuid(), _ROOT_UID} or is_shared:
        raise InvalidSetting(
            f"{path} can be changed by other users, and what is served could then be theirs; "
            f"check what it holds, then run: chmod go-w {path} as its owner, "
            "or name a place of yours."
        )


def _is_sticky(path: Path) -> bool:
    """Return whether a path is a folder where anyone may make files, and remove only their own."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return bool(stat.S_ISDIR(mode) and mode & stat.S_ISVTX)
