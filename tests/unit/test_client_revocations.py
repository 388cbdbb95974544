"""The list of revocations in one process: its lock, and the file that it is kept in."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from gemm_tuner.client import revocations
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


def test_a_thread_waits_for_the_list_that_another_asks_for(tmp_path: Path) -> None:
    known = KnownRevocations(Cache(tmp_path / "cache"), "service")
    is_asked, may_end = Event(), Event()
    asked: list[str] = []

    def fetch_slowly() -> bytes:
        asked.append("slowly")
        is_asked.set()
        assert may_end.wait(PATIENCE_S)
        return b"no list"

    def fetch() -> bytes:
        asked.append("again")
        return b"no list"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(known.ask, fetch_slowly, lambda _key_id: {})
        assert is_asked.wait(PATIENCE_S)
        known.ask(fetch, lambda _key_id: {}, longest_wait_s=0.01)
        assert known.is_due()  # nothing is known yet
        second = pool.submit(known.ask, fetch, lambda _key_id: {})
        assert not second.done()
        may_end.set()
        first.result(PATIENCE_S)
        second.result(PATIENCE_S)

    assert asked == ["slowly"]


def test_a_forked_child_asks_while_its_parent_does(tmp_path: Path) -> None:
    known = KnownRevocations(Cache(tmp_path / "cache"), "service")
    codes: list[int] = []

    def fetch() -> bytes:
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE_S)
            asked: list[bytes] = []
            known.ask(lambda: asked.append(b"") or b"no list", lambda _key_id: {})  # type: ignore[func-returns-value]
            os._exit(0 if asked else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return b"no list"

    known.ask(fetch, lambda _key_id: {})

    assert codes == [0]


def test_a_list_that_could_not_be_had_is_asked_for_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(revocations, "monotonic", lambda: now_s[0])
    known = KnownRevocations(Cache(tmp_path / "cache"), "service")

    known.ask(lambda: b"no list", lambda _key_id: {})

    assert not known.is_due()
    now_s[0] += revocations.ASK_AGAIN_S + 1
    assert known.is_due()
