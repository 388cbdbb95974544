"""Processes that run `gemm-tuner worker` beside a service: started, replaced and ended with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Self

# A worker lets go of its job after the trial in flight; asked again, it aborts the trial.
_GRACE_S = 8.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_MAX_DEATHS = 10  # one after the other, each before a worker has lived for as long as this:
_STEADY_S = 300.0


class WorkerProcesses:
    """Some worker processes on one database, which run while the context is open.

    They share neither memory nor threads with the service. One that ends is replaced after a pause,
    which grows; where ten end soon after each other, no other is started. `tell` takes a line for
    people. The system ends them with this process.
    """

    def __init__(self, count: int, database_url: str, *, tell: Callable[[str], None]) -> None:
        """Prepare `count` workers; none is started yet."""
        # Not as an argument, which all users of the machine can read.
        self._environment: Mapping[str, str] = {**os.environ, "GEMM_TUNER_DB": database_url}
        self._tell = tell
        self._is_over = Event()
        self._starting = Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        # The system ends a child with the thread that started it, so each has one of its own.
        self._threads = [
            Thread(target=self._keep_one, name=f"worker {number}", daemon=True)
            for number in range(count)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        with self._starting:
            self._is_over.set()
        try:
            for _request in ("let go of its job", "abort the trial"):
                self._send(signal.SIGTERM)
                deadline_s = time.monotonic() + _GRACE_S
                for thread in self._threads:
                    thread.join(max(0.0, deadline_s - time.monotonic()))
        finally:
            self._send(signal.SIGKILL)

    def _send(self, which: signal.Signals) -> None:
        for process in tuple(self._running):
            with suppress(ProcessLookupError):
                process.send_signal(which)

    def _keep_one(self) -> None:
        """Let a worker run until all are ended, and another when it dies."""
        deaths, pause_s = 0, _FIRST_PAUSE_S
        while deaths < _MAX_DEATHS:
            started_s = time.monotonic()
            process = self._start()
            if process is None:
                return
            code = process.wait()
            self._running.discard(process)
            if self._is_over.is_set():
                return
            if time.monotonic() - started_s > _STEADY_S:
                deaths, pause_s = 0, _FIRST_PAUSE_S
            deaths += 1
            self._tell(f"A worker ended ({_why(code)}); the next one starts in {pause_s:g} s.")
            if self._is_over.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self._tell(f"{deaths} workers ended one after the other; none is started any more.")

    def _start(self) -> "subprocess.Popen[bytes] | None":
        with self._starting:
            if self._is_over.is_set():
                return None
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gemm_tuner", "worker", "--parent", str(os.getpid())],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the service, which then ends its workers in order
            )
            self._running.add(process)
            return process


def _why(code: int) -> str:
    """Return how a process ended, by its exit code."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
