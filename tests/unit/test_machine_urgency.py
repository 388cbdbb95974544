"""How urgent the processes are that a tuning starts."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from gemm_tuner.machine.urgency import NICENESS, lower_urgency, start_session, tuning_beside_calls

HAS_GROUPS = Path("/proc/self/autogroup").exists()


@contextmanager
def started() -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a process that ends with the block."""
    process = start_session(["cat"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.communicate()


def niceness(process: "subprocess.Popen[bytes]") -> set[int]:
    """Return the niceness of a process, and that of its session where Linux has it."""
    found = {os.getpriority(os.PRIO_PROCESS, process.pid)}
    if HAS_GROUPS:
        found.add(int(Path(f"/proc/{process.pid}/autogroup").read_text().split()[-1]))
    return found


def test_a_session_is_as_nice_as_who_starts_it() -> None:
    found: list[set[int]] = []

    def start_nicely() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 12)  # of this thread
        with started() as process:
            found.append(niceness(process))

    thread = Thread(target=start_nicely)
    thread.start()
    thread.join()

    assert found == [{12}]


def test_what_is_tuned_beside_calls_is_nicer_than_they_are() -> None:
    with tuning_beside_calls(), started() as process:
        assert niceness(process) == {max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))}
    with started() as process:
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_child_of_a_fork_tunes_beside_nothing() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with tuning_beside_calls():
        child = os.fork()
        if child == 0:
            is_as_nice = False
            try:
                with started() as process:
                    is_as_nice = os.getpriority(os.PRIO_PROCESS, process.pid) == own
            finally:
                os._exit(0 if is_as_nice else 1)
        with started() as process:
            assert os.getpriority(os.PRIO_PROCESS, process.pid) == max(NICENESS, own)
    assert os.waitpid(child, 0)[1] == 0


def test_a_group_is_lowered_when_linux_allows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[Path, str]] = []

    def write(path: Path, text: str) -> None:
        written.append((path, text))
        if len(written) < 3:
            raise BlockingIOError

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    with tuning_beside_calls(), started() as process:
        own = max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
        assert written == [(Path(f"/proc/{process.pid}/autogroup"), str(own))] * 3


def test_a_sandbox_may_refuse_to_lower_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_more: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "nice", refuse)
    lower_urgency()


def test_no_ctrl_c_reaches_a_session() -> None:
    with started() as process:
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid


def test_a_command_that_is_not_there_is_told() -> None:
    with pytest.raises(FileNotFoundError):
        start_session(["no-such-command-of-any-machine"])
