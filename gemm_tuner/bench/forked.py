"""Run a task in a forked child that may crash or hang."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import TypeVar

from gemm_tuner.bench.crash import Report
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import GemmTunerError, TrialFailed

Result = TypeVar("Result")

_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of a child that gave no result; `running` is what it had said to run."""

    outcome: Outcome
    detail: str
    running: int


def run_in_child(
    task: Callable[[], Result], *, report: Report, stall_timeout_s: float, owner: Connection
) -> Result | Death:
    """Return the result of `task`, or how the child that ran it died.

    The child is ended when it does not call `report.step` for `stall_timeout_s`. When `owner` is
    closed at its other end, nobody waits for the answer: this process ends.

    Raises:
        GemmTunerError: what `task` raised.
    """
    report.clear()
    reader, writer = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        _live(task, report, writer)
    writer.close()
    with reader:
        if not _wait_for_result(reader, child, report, stall_timeout_s, owner):
            detail = f"did nothing for {stall_timeout_s:g} s"
            return Death(outcome=Outcome.HUNG, detail=detail, running=report.running)
        try:
            result: Result | GemmTunerError = reader.recv()
        except EOFError:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            outcome, detail = report.explain_death(status)
            return Death(outcome=outcome, detail=detail, running=report.running)
    os.waitpid(child, 0)
    if isinstance(result, GemmTunerError):
        raise result
    return result


def _live(task: Callable[[], object], report: Report, writer: Connection) -> None:
    """Do the task and end the process, without the exit handlers that belong to its parent."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        report.watch()
        try:
            result = task()
        except GemmTunerError as error:
            writer.send(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
            writer.send(TrialFailed(f"the trial broke: {error!r}; please report this."))
        else:
            writer.send(result)
    finally:
        os._exit(0)


def _wait_for_result(
    reader: Connection, child: int, report: Report, stall_timeout_s: float, owner: Connection
) -> bool:
    """Wait until the child has answered or died; end it and return False if it hangs."""
    steps, last_step_s = report.steps, time.monotonic()
    while True:
        ready = wait([reader, owner], timeout=_POLL_S)
        if reader in ready:
            return True
        if owner in ready:
            os.kill(child, signal.SIGKILL)
            sys.exit(0)
        if report.steps != steps:
            steps, last_step_s = report.steps, time.monotonic()
        elif time.monotonic() - last_step_s > stall_timeout_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
