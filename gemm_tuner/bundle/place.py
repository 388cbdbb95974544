"""The place of a bundle: what may be replaced there, and how the new one takes it, all at once.

A bundle is made in a folder beside its place. What a process that was killed left there is removed
by the next, and what it had moved away is put back.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.scratch import scratch_folder

SUMS = "SHA256SUMS"
TABLE = "gemm_tuner_bundle_table.h"
ENCODING = "utf-8"  # wherever it is made

_PREFIX = ".gemm-tuner-bundle-"
_NEW = "new"
_FORMER = "former"  # what is here had to leave its place, for a moment
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_place(folder: Path) -> None:
    """Check that a folder is new, empty, or an older bundle with nothing else in it.

    What was built in `build`, as the bundle's README says, may be in it too.

    Raises:
        InvalidSetting: it is something else, or holds something else.
    """
    try:
        if not folder.exists() and not folder.is_symlink():
            return
        other = _what_else(folder)
    except OSError as error:
        raise not_written(folder, error) from None
    if other is not None:
        raise InvalidSetting(
            f"{folder} is not replaced by a bundle: {other}; name a new or an empty folder."
        )


def not_written(folder: Path, error: OSError) -> InvalidSetting:
    """Return the error that a bundle cannot be written to its place."""
    return InvalidSetting(
        f"the bundle {folder} cannot be written ({error.strerror}); name another folder."
    )


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to make a bundle in, which then takes its place whole, or not at all.

    Raises:
        InvalidSetting: the place holds something else than a bundle, or cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(_PREFIX, parent=folder.parent, before_removal=_put_back) as staging:
            check_place(folder)
            made = staging / _NEW
            made.mkdir()
            yield made
            _put_in_place(made, folder)
    except OSError as error:
        raise not_written(folder, error) from None


def _what_else(folder: Path) -> str | None:
    """Return what keeps a folder from being replaced, None if nothing does."""
    if folder.is_symlink() or not folder.is_dir():
        return f"it is no folder{' but a link' if folder.is_symlink() else ''}"
    if not any(folder.iterdir()):
        return None
    sums = folder / SUMS
    lines = sums.read_text(ENCODING, errors="replace").splitlines() if sums.is_file() else []
    ours = {SUMS, "kernels", *(line.partition("  ")[2] for line in lines)}
    if TABLE not in ours:
        return "it is no bundle"
    if (folder / "build" / "CMakeCache.txt").is_file():
        ours.add("build")
    device = folder.stat().st_dev
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.lstat().st_dev != device:
            return f"{name!r} in it is mounted"
        is_built = name.startswith("build/") and "build" in ours
        if not is_built and (name not in ours or path.is_symlink()):
            return f"{name!r} in it is of something else"
    return None


def _put_back(staging: Path) -> None:
    """Put back what a process that was killed had moved away."""
    for former in (staging / _FORMER).glob("*"):
        if not os.path.lexists(staging.parent / former.name):
            former.rename(staging.parent / former.name)


def _put_in_place(made: Path, folder: Path) -> None:
    """Let a new bundle and what was in its place change places, at once where Linux can do that."""
    if _exchange(made, folder):
        return
    if not folder.exists():
        made.rename(folder)
        return
    former = made.parent / _FORMER / folder.name
    former.parent.mkdir()
    try:
        folder.rename(former)
        made.rename(folder)
    finally:
        if not folder.exists():
            former.rename(folder)


def _exchange(one: Path, other: Path) -> bool:
    """Return whether two folders changed places, for which both must be there."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # older C libraries have none
    if exchange is None:
        return False
    paths = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other)
    return bool(exchange(*paths, _RENAME_EXCHANGE) == 0)
