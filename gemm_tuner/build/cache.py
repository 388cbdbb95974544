"""The folder of built binaries, each named by everything that went into it.

The SHA-256 of a binary stands behind its last byte, where loaders do not look.
"""

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from platformdirs import user_cache_path

from gemm_tuner.errors import StoreFailed
from gemm_tuner.files import read_bounded

CACHE_VARIABLE = "GEMM_TUNER_CACHE"

_LOG = logging.getLogger(__name__)

_DIGEST_BYTES = sha256().digest_size
MAX_BUILD_BYTES = 2**26


def build_cache_dir() -> Path:
    """Return the private folder for built binaries, made if it did not exist.

    Raises:
        StoreFailed: the folder cannot be made, or others can write to it.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    root = Path(chosen) if chosen else user_cache_path("gemm-tuner")
    folder = root / "builds"
    make_private(folder)
    return folder


def make_private(folder: Path) -> None:
    """Make a folder that native code is loaded from, so that nobody else has a hand in it.

    Raises:
        StoreFailed: the folder cannot be made, or others can write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise StoreFailed(
            f"the cache directory {folder} cannot be used ({error.strerror}); "
            f"set {CACHE_VARIABLE} to a directory of yours."
        ) from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise StoreFailed(
            f"the cache directory {folder} can be written by others; run chmod 700 on it, "
            f"or set {CACHE_VARIABLE} to a directory of yours."
        )


@contextmanager
def building(name: str, longest_wait_s: float) -> Iterator[None]:
    """Hold the lock of what has this name, so that one process builds it and others find it.

    Who has waited for `longest_wait_s`, or cannot lock, goes on without: building twice harms
    nothing.

    Raises:
        StoreFailed: the folder cannot be made, or others can write to it.
    """
    # Each process that runs trials imports this module, and takes longer to load filelock.
    from filelock import FileLock  # noqa: PLC0415

    lock = FileLock(build_cache_dir() / f"{name}.lock", timeout=longest_wait_s, mode=0o600)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # no time left, or a file system without locks
        _LOG.debug("Built without a lock: %s", error)
    try:
        yield
    finally:
        lock.release()


def read_build(path: Path) -> bytes | None:
    """Return the binary that `write_build` wrote, or None if it is not there, or was changed."""
    try:
        content = read_bounded(path, MAX_BUILD_BYTES)
    except OSError:
        return None
    binary, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return binary if sha256(binary).digest() == digest else None


def write_build(path: Path, binary: bytes) -> None:
    """Write a binary, and behind it what its bytes are checked by.

    Raises:
        StoreFailed: the folder is not writable or the disk is full.
    """
    write_atomically(path, binary + sha256(binary).digest())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file of the cache that other processes see whole or not at all.

    Raises:
        StoreFailed: the folder is not writable or the disk is full.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink()
            raise
    except OSError as error:
        raise StoreFailed(
            f"{path} cannot be written ({error.strerror}); free some space, or set "
            f"{CACHE_VARIABLE} to a writable folder."
        ) from error
