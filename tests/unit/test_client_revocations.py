"""The list of revocations in one process: its lock, and the file that it is kept in."""

import os
import signal
from pathlib import Path

from gemm_tuner.client.cache import Cache
from gemm_tuner.client.revocations import KnownRevocations

PATIENCE_S = 20


def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent(tmp_path: Path) -> None:
    known = KnownRevocations(Cache(tmp_path / "cache"), "service")
    with known._lock:  # as a thread that takes a list
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE_S)
            known.ask(lambda: b"no list", lambda _key_id: {})
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert code == 0


def test_a_damaged_file_is_asked_for_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.keep_revocations("service", b"damaged")
    known = KnownRevocations(cache, "service")

    assert known.is_due()
    assert known.is_due()
