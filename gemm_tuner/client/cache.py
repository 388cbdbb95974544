"""The client's private directory: artifacts by their sha256, signed answers by what was asked.

What is read from here is checked like what comes from the network, so a damaged entry costs a
fetch and nothing else.
"""

import os
import stat
from hashlib import sha256
from pathlib import Path

from platformdirs import user_cache_path

from gemm_tuner.build.cache import CACHE_VARIABLE, write_atomically
from gemm_tuner.errors import StoreFailed


def default_cache_dir() -> Path:
    """Return the client's directory in the user's cache, or in what `GEMM_TUNER_CACHE` names."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return (Path(chosen) if chosen else user_cache_path("gemm-tuner")) / "client"


class Cache:
    """Files under one directory that only this user can write.

    Raises:
        StoreFailed: the directory cannot be made, or others can write to it.
    """

    def __init__(self, root: Path) -> None:
        self._artifacts = root / "artifacts"
        self._answers = root / "answers"
        try:
            for directory in (root, self._artifacts, self._answers):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = root.stat()
        except OSError as error:
            raise StoreFailed(
                f"cache directory {root} cannot be used: {error.strerror}; "
                f"set {CACHE_VARIABLE} to a directory of yours."
            ) from None
        # Native code is loaded from here: nobody else may have a hand in it.
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise StoreFailed(
                f"cache directory {root} can be written by others; run chmod 700 on it, "
                f"or set {CACHE_VARIABLE} to a directory of yours."
            )

    def artifact(self, digest: str) -> bytes | None:
        """Return the artifact with this sha256; a damaged copy is dropped."""
        path = self._artifacts / digest
        binary = _read(path)
        if binary is not None and sha256(binary).hexdigest() != digest:
            path.unlink(missing_ok=True)
            return None
        return binary

    def keep_artifact(self, digest: str, binary: bytes) -> None:
        """Keep an artifact that was checked."""
        write_atomically(self._artifacts / digest, binary)

    def answer(self, key: str) -> bytes | None:
        """Return the answer kept under this key, not yet checked."""
        return _read(self._answers / key)

    def keep_answer(self, key: str, answer: bytes) -> None:
        """Keep an answer that was checked."""
        write_atomically(self._answers / key, answer)

    def drop_answer(self, key: str) -> None:
        """Forget the answer kept under this key."""
        (self._answers / key).unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
