"""Who measures holds a lock, and may take it again; other threads and processes wait."""

import subprocess
import sys
import threading

import pytest

from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.measuring_lock import MeasuringLock, as_holder, measuring
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


def test_a_process_that_the_holder_started_does_not_wait() -> None:
    code = "from gemm_tuner.machine.measuring_lock import measuring\nwith measuring(): print('yes')"

    with measuring():
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
        )

    assert done.stdout == "yes\n"


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
        assert "waiting for another process of yours" in caplog.text
    thread.join(120)
    assert found
