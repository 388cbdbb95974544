"""Where a command writes a file: looked at before the work, which may take long."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from gemm_tuner.files import behind_links
from gemm_tuner.store.sql.database import database_file, default_database_url
from gemm_tuner.user_file import cannot_be_written


def check_place(out: Path | None, *, databases: Sequence[str | None] = ()) -> None:
    """Check that a file can be written if one is named, as far as that can be said before.

    `databases` are URLs of those that the command reads, None for the user's own. Whether somebody
    reads a pipe is not asked: who reads it would take the question for the end.

    Raises:
        InvalidSetting: it is a folder or in none, its links lead in a circle, this user may not
            write it, or it belongs to a database.
    """
    if out is None:
        return
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
    is_replaced = target.is_file() or not target.exists()
    if is_replaced and not os.access(target.parent, os.W_OK | os.X_OK):
        return f"permission denied in its folder {target.parent}"
    return None


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
