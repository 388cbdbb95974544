"""Write small files that others see whole or not at all."""

import os
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp


def write_privately(path: Path, content: bytes) -> None:
    """Write a file of mode 0600, on the disk when this returns, in the place of one that is there.

    Raises:
        OSError: its folder cannot be written, or the disk is full.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(path, content, 0o600)


def write_publicly(path: Path, content: bytes) -> None:
    """Write a file that everyone may read, else as `write_privately`.

    Raises:
        OSError: its folder cannot be written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, content, 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    handle, name = mkstemp(dir=path.parent, prefix=f".{path.name}")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(content)
            file.flush()
            os.fsync(handle)
        Path(name).replace(path)
    except OSError:
        with suppress(OSError):
            Path(name).unlink()
        raise
