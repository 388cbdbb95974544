"""How long processes wait for a core, and what is waited for them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import pytest

from gemm_tuner.machine import waiting
from gemm_tuner.machine.urgency import start_session
from gemm_tuner.machine.waiting import wait_for_session, waited_for_core_s


@contextmanager
def busy_on(core: int) -> Iterator[int]:
    """Yield a process that computes on one core."""
    program = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", program]) as process:
        yield process.pid
        process.kill()


def test_of_two_that_share_a_core_each_waits_for_it() -> None:
    core = min(os.sched_getaffinity(0))
    with busy_on(core) as one, busy_on(core) as other:
        end_s = time.monotonic() + 60
        while min(waited_for_core_s(one), waited_for_core_s(other)) < 0.02:
            assert time.monotonic() < end_s


def test_who_is_over_does_not_wait() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()

    assert waited_for_core_s(process.pid) == 0


@pytest.mark.parametrize(("waited_s", "looks"), [(0.0, 3), (8.0, 11)])
def test_a_session_has_its_time_besides_what_it_waits(
    waited_s: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver of a compiler starts another process, which is what waits."""
    clock_s = count()
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: next(clock_s)))
    monkeypatch.setattr(waiting, "_LOOK_S", 0)
    seen = []
    with start_session(
        ["sh", "-c", "read line & read line"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as leader:

        def waited(process: int) -> float:
            seen.append(process)
            return waited_s if process == leader.pid else 0.0

        monkeypatch.setattr(waiting, "waited_for_core_s", waited)
        with pytest.raises(subprocess.TimeoutExpired):
            wait_for_session(leader, 3)
        leader.kill()

    assert seen.count(leader.pid) == looks - 1
    assert all(os.getsid(0) != process for process in seen)


def test_a_session_that_ends_is_waited_for() -> None:
    with start_session(["true"]) as leader:
        wait_for_session(leader, 60)

    assert leader.returncode == 0
