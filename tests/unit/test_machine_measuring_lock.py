"""Who measures holds a lock, and may take it again; other threads and processes wait."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from multiprocessing import get_context
from pathlib import Path

import pytest

from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import PreparationStopped, StoreFailed
from gemm_tuner.machine.measuring_lock import (
    MeasuringLock,
    as_holder,
    measuring,
    waiting_at_most,
)
from gemm_tuner.tuning.tune import Tuned, tune


def test_who_measures_may_take_the_lock_again() -> None:
    other = MeasuringLock()
    with measuring():
        with measuring():
            assert not other.acquire()
        assert not other.acquire(), "the inner one does not end it"
    assert other.acquire()
    other.release()


def test_another_thread_waits() -> None:
    ended = threading.Event()

    def measure() -> None:
        with measuring():
            ended.set()

    with measuring():
        thread = threading.Thread(target=measure)
        thread.start()
        assert not ended.wait(0.2)
    assert ended.wait(10)
    thread.join()


def test_a_holder_of_another_lock_does_not_wait() -> None:
    lock = MeasuringLock()
    assert lock.acquire()
    with as_holder(), measuring():
        pass
    lock.release()


def _measures(seconds: float) -> bool:
    """Return whether a new process measures within so many seconds."""
    code = "from gemm_tuner.machine.measuring_lock import measuring\nwith measuring(): print('yes')"
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=True)
    except subprocess.TimeoutExpired:
        return False
    return done.stdout == b"yes\n"


def test_a_process_that_the_holder_started_waits() -> None:
    with measuring():
        assert not _measures(3)
    assert _measures(30)


def test_a_forked_child_neither_measures_nor_keeps_the_lock() -> None:
    context = get_context("fork")
    began, end = context.Event(), context.Event()

    def look() -> None:
        lock = MeasuringLock()
        if not lock.acquire() and "process" in lock.holder_text():
            began.set()
        end.wait(30)

    with measuring():
        child = context.Process(target=look)
        child.start()
        assert began.wait(10), "it measures beside its parent"
    other = MeasuringLock()
    assert other.acquire(), "the child keeps what its parent gave back"
    other.release()
    end.set()
    child.join()


def test_a_forked_child_waits_for_its_parent() -> None:
    context = get_context("fork")
    ended = context.Event()

    def measure() -> None:
        with measuring():
            ended.set()

    with measuring():
        child = context.Process(target=measure)
        child.start()
        assert not ended.wait(0.3)
    assert ended.wait(10)
    child.join()


def test_a_file_system_without_locks_is_told_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)

    with pytest.raises(StoreFailed, match=r"No locks available.*XDG_DATA_HOME"), measuring():
        pass


def test_a_folder_in_place_of_the_file_is_to_be_removed(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="remove what is there"):
        MeasuringLock(tmp_path).acquire()


def test_a_link_in_place_of_the_file_is_to_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.symlink_to("nothing")
    with pytest.raises(StoreFailed, match="remove what is there"):
        MeasuringLock(path).acquire()


def test_a_thread_waits_no_longer_than_it_may() -> None:
    other = MeasuringLock()
    assert other.acquire()
    waits = pytest.raises(PreparationStopped, match="waiting for another thread of this program")
    with waits, waiting_at_most(0.0), measuring():
        raise AssertionError("it measures beside the other")
    other.release()
    with waiting_at_most(0.0), measuring():
        pass


def test_tuning_waits_for_whoever_measures(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gemm_tuner")
    url = f"sqlite:///{tmp_path_factory.mktemp('db')}/tuned.sqlite3"
    found: list[Tuned] = []

    def run() -> None:
        problem = Problem.create(4, 16, 16)
        found.append(tune(problem, budget_s=1.0, db_url=url))

    with measuring():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(0.5)
        assert not found
        assert "waiting for another thread of this program" in caplog.text
        assert "for how long is not known" in caplog.text
    thread.join(120)
    assert found
