"""The client's private directory: artifacts by their sha256, signed answers by what was asked.

Entries are checked like answers from the network, so a damaged one costs a fetch and nothing else.
"""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from gemm_tuner.build.cache import CACHE_VARIABLE, make_private, write_atomically
from gemm_tuner.errors import StoreFailed
from gemm_tuner.files import open_plain

MAX_ARTIFACT_BYTES = 2**26
MAX_ANSWER_BYTES = 2**21
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0

_LOG = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """Return the client's directory in the user's cache, or in what `GEMM_TUNER_CACHE` names."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return (Path(chosen) if chosen else user_cache_path("gemm-tuner")) / "client"


class Cache:
    """Files under one directory that only this user can write.

    Any number of processes can use it. Where it cannot be made or written, it keeps nothing and
    says so once: kernels are then fetched by each process.

    Raises:
        StoreFailed: others can write to the directory.
    """

    def __init__(self, root: Path) -> None:
        self._artifacts = root / "artifacts"
        self._answers = root / "answers"
        self._locks = root / "locks"
        self._revocations = root / "revocations"
        self._is_warned = False
        for folder in (root, self._artifacts, self._answers, self._revocations, self._locks):
            try:
                make_private(folder)
            except StoreFailed as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                self._warn(error)

    def artifact(self, digest: str) -> bytes | None:
        """Return the artifact with this sha256; a damaged copy is none."""
        binary = _read(self._artifacts / digest, MAX_ARTIFACT_BYTES)
        return binary if binary is not None and sha256(binary).hexdigest() == digest else None

    def keep_artifact(self, digest: str, binary: bytes) -> None:
        """Keep an artifact that was checked."""
        self._write(self._artifacts / digest, binary)

    @contextmanager
    def fetching(self, digest: str, longest_wait_s: float) -> Iterator[None]:
        """Hold the artifact's lock, so that one process fetches it and others find it here.

        Who finds it, has waited for `longest_wait_s`, or cannot lock, goes on without: fetching
        twice harms nothing.
        """
        lock = FileLock(self._locks / digest, blocking=False, mode=0o600)
        try:
            self._wait(lock, digest, time.monotonic() + longest_wait_s)
            yield
        finally:
            lock.release()

    def _wait(self, lock: FileLock, digest: str, until: float) -> None:
        """Wait for a lock with growing pauses: hundreds who look often leave no core to the one."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                lock.acquire()
            except Timeout:
                rest_s = until - time.monotonic()
                if rest_s <= 0 or self.artifact(digest) is not None:
                    return
                time.sleep(min(pause_s, rest_s))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except (OSError, NotImplementedError) as error:
                _LOG.debug("Fetched without a lock: %s", error)
                return
            else:
                return

    def answer(self, key: str) -> bytes | None:
        """Return the answer kept under this key, not yet checked."""
        return _read(self._answers / key, MAX_ANSWER_BYTES)

    def keep_answer(self, key: str, answer: bytes) -> None:
        """Keep an answer that was checked."""
        self._write(self._answers / key, answer)

    def _write(self, path: Path, content: bytes) -> None:
        # A full disk costs a fetch, and must not cost the kernel that was fetched and checked.
        try:
            write_atomically(path, content)
        except StoreFailed as error:
            self._warn(error)

    def _warn(self, error: StoreFailed) -> None:
        if not self._is_warned:
            _LOG.warning("The cache does not keep what was fetched: %s", error)
        self._is_warned = True

    def revocations(self, name: str) -> bytes | None:
        """Return the list of revocations kept under this name; one that others wrote is none.

        Nothing in it is signed.
        """
        return _read(self._revocations / name, MAX_ANSWER_BYTES, is_own=True)

    def stamp_of_revocations(self, name: str) -> tuple[float, int]:
        """Return when the list was kept, in s since 1970, and its inode; zeros without one."""
        try:
            status = (self._revocations / name).lstat()
        except OSError:
            return (0.0, 0)
        return (status.st_mtime, status.st_ino)

    def keep_revocations(self, name: str, content: bytes) -> None:
        """Keep a list of revocations that was checked."""
        self._write(self._revocations / name, content)

    def forget_revocations(self, name: str) -> None:
        """Forget the list of revocations kept under this name, if there is one."""
        (self._revocations / name).unlink(missing_ok=True)


def _read(path: Path, limit_bytes: int, *, is_own: bool = False) -> bytes | None:
    try:
        with open_plain(path, follows_links=not is_own) as file:
            status = os.fstat(file.fileno())
            if is_own and (status.st_uid != os.getuid() or status.st_mode & 0o022):
                return None
            content = file.read(limit_bytes + 1)
    except OSError:
        return None
    return content if len(content) <= limit_bytes else None
