"""Where a command writes a file: looked at before the work, which may take long."""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.files import behind_links
from gemm_tuner.store.sql.database import (
    database_file,
    default_database_file,
    default_database_url,
)
from gemm_tuner.user_file import cannot_be_written, make_folder_of


def check_place(
    out: Path | None,
    *,
    databases: Sequence[str | None] = (),
    others: Sequence[Path | None] = (),
    makes_folder: bool = False,
) -> None:
    """Check that a file can be written if one is named, as far as that can be said before.

    `databases` are URLs of those that the command reads, None for the user's own, which is kept
    from being written over in any case; `others` are files that the command reads or writes as
    well. Whether somebody reads a pipe is not asked: who reads it would take the question for the
    end. With `makes_folder`, its folder is made where there is none.

    Raises:
        InvalidSetting: it is a folder or in none, its links lead in a circle, this user may not
            write it, it belongs to a database, holds keys, or is one of the others.
    """
    if out is None:
        return
    if makes_folder:
        make_folder_of(out)
    with _told(out):
        why = _why_not(out)
    if why is not None:
        raise cannot_be_written(out, why)
    check_no_database(out, databases)
    _check_no_key(out)
    with _told(out):
        if _is_one_of(out, filter(None, others)):
            raise cannot_be_written(out, "the command reads or writes it already")


def check_public_folder(folder: Path, databases: Sequence[str | None]) -> None:
    """Check that a folder which a command fills for others is none of databases and keys.

    Raises:
        InvalidSetting: it is the place of one of these, or the user's own folder.
    """
    check_no_database(folder, databases)
    _check_no_key(folder)
    with _told(folder):
        if _is_one_of(folder, [default_database_file().parent]):
            raise cannot_be_written(folder, "databases and keys are kept in it")


def _check_no_key(place: Path) -> None:
    with _told(place):
        if _is_one_of(place, _files_of_keys()):
            raise cannot_be_written(place, "keys are kept in it")


def check_no_database(place: Path, databases: Sequence[str | None]) -> None:
    """Check that what a command makes is no file of a database, not even one that may come.

    SQLite would find it in the place of a file of its own.

    Raises:
        InvalidSetting: it is one, of `databases` or of the user's own, or is no place at all.
    """
    with _told(place):
        if _is_one_of(place, _files_of(databases)):
            raise cannot_be_written(place, "it is a file of the database")


@contextmanager
def _told(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_be_written(place, error.strerror or str(error)) from error


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


def _is_one_of(place: Path, files: Iterable[Path]) -> bool:
    """Return whether a file is one of others by any name, also where it is not yet there."""
    kept = tuple(files)
    is_same = place.exists() and any(file.exists() and place.samefile(file) for file in kept)
    return is_same or os.path.realpath(place) in map(os.path.realpath, kept)


def _files_of(databases: Sequence[str | None]) -> Iterator[Path]:
    """Yield the files that SQLite keeps for some databases and the user's own, or may."""
    found = [default_database_file(), *(database_file(url) for url in databases if url is not None)]
    with suppress(InvalidSetting):  # of no concern to who reads none
        found.append(database_file(default_database_url()))
    for file in filter(None, found):
        # SQLite puts the others beside the file that links lead to.
        for name in {str(file), os.path.realpath(file)}:
            yield from (Path(f"{name}{end}") for end in ("", "-wal", "-shm", "-journal"))


def _files_of_keys() -> Iterator[Path]:
    """Yield the files of the user's own keys, and of those that the user believes."""
    # Imported here: cryptography and pydantic take long to load.
    from gemm_tuner.client.keys import KnownKeys  # noqa: PLC0415
    from gemm_tuner.trust.attestation import MeasuringKeys  # noqa: PLC0415
    from gemm_tuner.trust.keys import KEY_VARIABLE, default_key_path  # noqa: PLC0415
    from gemm_tuner.trust.succession import succession_path  # noqa: PLC0415

    measuring, signing = MeasuringKeys(), default_key_path()
    yield from (measuring.own_path, measuring.accepted_path, KnownKeys().path)
    for key in (signing, *map(Path, filter(None, [os.environ.get(KEY_VARIABLE)]))):
        yield from (key, succession_path(key))
