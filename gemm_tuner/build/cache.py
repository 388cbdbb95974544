"""The folder of built binaries, each named by everything that went into it."""

import os
import tempfile
from pathlib import Path

from platformdirs import user_cache_path

from gemm_tuner.errors import StoreFailed

CACHE_VARIABLE = "GEMM_TUNER_CACHE"


def build_cache_dir() -> Path:
    """Return the folder for built binaries, made private if it did not exist.

    Raises:
        StoreFailed: the folder cannot be made.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    root = Path(chosen) if chosen else user_cache_path("gemm-tuner")
    folder = root / "builds"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreFailed(
            f"the build cache {folder} cannot be made ({error.strerror}); "
            f"set {CACHE_VARIABLE} to a writable folder."
        ) from error
    return folder


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that other processes see whole or not at all.

    Raises:
        StoreFailed: the folder is not writable or the disk is full.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError as error:
        raise StoreFailed(
            f"{path} cannot be written ({error.strerror}); free some space, "
            f"or set {CACHE_VARIABLE} to a writable folder."
        ) from error
