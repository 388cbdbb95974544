"""Write a file that a user named, and say what is wrong where that cannot be."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.files import written_whole


@contextmanager
def user_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file as `written_whole` does.

    Raises:
        InvalidSetting: it cannot be written.
    """
    try:
        with written_whole(path) as file:
            yield file
    except OSError as error:
        raise cannot_be_written(path, error.strerror or str(error)) from error


def make_folder_of(path: Path) -> None:
    """Make the folder of a file that is to be written, where there is none.

    Raises:
        InvalidSetting: it cannot be made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = f"its folder cannot be made ({error.strerror or error})"
        raise cannot_be_written(path, why) from error


def cannot_be_written(path: Path, why: str) -> InvalidSetting:
    """Return the error of a file that cannot be written."""
    return InvalidSetting(f"file {path} cannot be written: {why}; name another.")
