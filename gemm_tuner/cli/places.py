"""Where a command writes a file: looked at before the work, which may take long."""

import os
from pathlib import Path

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.files import behind_links


def check_place(out: Path) -> None:
    """Check that a file can be written.

    Raises:
        InvalidSetting: it is a folder or in none, its links lead in a circle, or this user may not.
    """
    try:
        behind_links(out)
    except OSError as error:
        raise cannot_be_written(out, error.strerror or str(error)) from error
    if out.is_dir():
        raise cannot_be_written(out, "it is a folder")
    if not out.parent.is_dir():
        raise cannot_be_written(out, f"there is no folder {out.parent}")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise cannot_be_written(out, "permission denied")


def cannot_be_written(out: Path, why: str) -> InvalidSetting:
    """Return the error of a file that cannot be written."""
    return InvalidSetting(f"file {out} cannot be written: {why}; give another one by --out.")
