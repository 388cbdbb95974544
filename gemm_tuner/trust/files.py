"""Write small files that belong to one user, and that others see whole or not at all."""

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
    handle, name = mkstemp(dir=path.parent, prefix=f".{path.name}")  # made with mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(handle)
        Path(name).replace(path)
    except OSError:
        with suppress(OSError):
            Path(name).unlink()
        raise
