"""The client's private directory: artifacts by their sha256, signed answers by what was asked.

Entries are checked like answers from the network, so a damaged one costs a fetch and nothing else.
"""

import logging
import os
from hashlib import sha256
from pathlib import Path

from platformdirs import user_cache_path

from gemm_tuner.build.cache import CACHE_VARIABLE, make_private, write_atomically
from gemm_tuner.client.files import read_bounded
from gemm_tuner.errors import StoreFailed

MAX_ARTIFACT_BYTES = 2**26
MAX_ANSWER_BYTES = 2**21

_LOG = logging.getLogger(__name__)


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
        for folder in (root, self._artifacts, self._answers):
            make_private(folder)

    def artifact(self, digest: str) -> bytes | None:
        """Return the artifact with this sha256; a damaged copy is none."""
        binary = _read(self._artifacts / digest, MAX_ARTIFACT_BYTES)
        return binary if binary is not None and sha256(binary).hexdigest() == digest else None

    def keep_artifact(self, digest: str, binary: bytes) -> None:
        """Keep an artifact that was checked."""
        _write(self._artifacts / digest, binary)

    def answer(self, key: str) -> bytes | None:
        """Return the answer kept under this key, not yet checked."""
        return _read(self._answers / key, MAX_ANSWER_BYTES)

    def keep_answer(self, key: str, answer: bytes) -> None:
        """Keep an answer that was checked."""
        _write(self._answers / key, answer)


def _read(path: Path, limit_bytes: int) -> bytes | None:
    try:
        return read_bounded(path, limit_bytes)
    except OSError:
        return None


def _write(path: Path, content: bytes) -> None:
    # A full disk costs a fetch, and must not cost the kernel that was fetched and checked.
    try:
        write_atomically(path, content)
    except StoreFailed as error:
        _LOG.warning("The cache does not keep what was fetched: %s", error)
