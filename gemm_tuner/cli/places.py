"""Where a command writes a file: looked at before the work, which may take long."""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from gemm_tuner.files import behind_links
from gemm_tuner.store.sql.database import database_file, default_database_url
from gemm_tuner.user_file import cannot_be_written, make_folder_of


def check_place(
    out: Path | None, *, databases: Sequence[str | None] = (), makes_folder: bool = False
) -> None:
    """Check that a file can be written if one is named, as far as that can be said before.

    `databases` are URLs of those that the command reads, None for the user's own. Whether somebody
    reads a pipe is not asked: who reads it would take the question for the end. With
    `makes_folder`, its folder is made where there is none.

    Raises:
        InvalidSetting: it is a folder or in none, its links lead in a circle, this user may not
            write it, or it belongs to a database.
    """
    if out is None:
        return
    if makes_folder:
        make_folder_of(out)
    try:
        why = _why_not(out) or _why_not_beside(out, databases)
    except OSError as error:
        raise cannot_be_written(out, error.strerror or str(error)) from error
    if why is not None:
        raise cannot_be_written(out, why)


def _why_not(out: Path) -> str | None:
    target = behind_links(out)
    if target.is_symlink():
        return None  # open already
    if target.is_dir():
        return "it is a folder"
    if not target.parent.is_dir():
        return f"there is no folder {target.parent if out.is_symlink() else out.parent}"
    if target.exists() and not os.access(target, os.W_OK):
        return "permission denied"
    return _why_not_replaced(target) if target.is_file() or not target.exists() else None


def _why_not_replaced(file: Path) -> str | None:
    if not os.access(file.parent, os.W_OK | os.X_OK):
        return f"permission denied in its folder {file.parent}"
    if file.exists() and _is_kept_for_others(file):
        return f"its folder {file.parent} lets only the file's owner replace it"
    return None


def _is_kept_for_others(file: Path) -> bool:
    """Return whether a folder such as /tmp keeps others than the owners from replacing a file."""
    folder = file.parent.stat()
    owners = {0, file.stat().st_uid, folder.st_uid}
    return bool(folder.st_mode & stat.S_ISVTX) and os.geteuid() not in owners


def _why_not_beside(out: Path, databases: Sequence[str | None]) -> str | None:
    """Return why a file may not be written where databases are, also where it is not yet there.

    SQLite would find it in the place of a file of its own.
    """
    kept = [*_files_of(databases)]
    is_same = out.exists() and any(file.exists() and out.samefile(file) for file in kept)
    if is_same or os.path.realpath(out) in map(os.path.realpath, kept):
        return "it is a file of the database"
    return None


def _files_of(databases: Sequence[str | None]) -> Iterator[Path]:
    """Yield the files that SQLite keeps for some databases, or may."""
    for url in databases:
        file = database_file(url or default_database_url())
        if file is not None:
            # SQLite puts the others beside the file that links lead to.
            for name in {str(file), os.path.realpath(file)}:
                yield from (Path(f"{name}{end}") for end in ("", "-wal", "-shm", "-journal"))
