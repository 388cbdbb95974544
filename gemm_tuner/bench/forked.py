"""Run a task in a forked child that may crash, hang, or do harm."""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, TypeVar, cast

from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.messages import messages_of, receive, send
from gemm_tuner.domain.record import Outcome
from gemm_tuner.errors import (
    BaselineMissing,
    GemmTunerError,
    IsaNotUsable,
    KernelRejected,
    NotEnoughMemory,
    TrialFailed,
)
from gemm_tuner.machine.available_memory import available_memory_bytes
from gemm_tuner.machine.waiting import waited_for_core_s
from gemm_tuner.sandbox.system_calls import Answer, refuse_system_calls

Result = TypeVar("Result")

_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h
_CPU_LIMIT_S = 3600
_STANDARD_ERROR = 2
_LONGEST_S = 2 * _CPU_LIMIT_S  # on a machine that is busy
# What a trial may say instead of an answer: another error would speak of what it cannot know.
_ERRORS = (BaselineMissing, IsaNotUsable, KernelRejected, NotEnoughMemory, TrialFailed)
_SPARE_BYTES = 1 << 30  # addresses that libraries reserve and do not use


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What a child may not do: start threads or programs, and none of what a kernel has no use for.

    `answer` is what a refused system call gets. An error leaves a library that tries in vain alone.
    """

    answer: Answer
    threads: bool
    programs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of a child that gave no result; `running` is what it had said to run."""

    outcome: Outcome
    detail: str
    running: int


def run_in_child(
    task: Callable[[], Result],
    *,
    report: Report,
    stall_timeout_s: float,
    owner: Connection,
    wanted: Any = None,  # noqa: ANN401 - a type
    guard: Guard | None = None,
    longest_s: float = _LONGEST_S,
) -> Result | Death:
    """Return the result of `task`, or how the child that ran it died.

    The child is ended when it does not call `report.step` for `stall_timeout_s`, besides the time
    that it waited for a core, and after `longest_s` in any case, since a kernel can call it too.
    When `owner` is closed at its other end, nobody waits for the answer: this process ends. An
    answer that is not of the type `wanted` counts as a death; None for a child that is trusted to
    answer with anything. Without a `guard`, the child may do what this process may.

    Raises:
        GemmTunerError: what `task` raised.
    """
    report.clear()
    if wanted is not None:
        messages_of(wanted)
    reader, writer = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        owner.close()
        _live(task, report, writer, wanted, guard)
    writer.close()
    with reader:
        detail = _wait_for_result(
            reader, child, report, owner, stall_timeout_s=stall_timeout_s, longest_s=longest_s
        )
        if detail is not None:
            return Death(outcome=Outcome.HUNG, detail=detail, running=report.running)
        try:
            with _deadline(child, stall_timeout_s + waited_for_core_s(child)) as is_over:
                result = reader.recv() if wanted is None else receive(reader, wanted)
        except EOFError:
            status = _status_of(child, stall_timeout_s)
            if status is None or is_over():
                outcome, detail = Outcome.HUNG, "began to answer or closed its pipe, and went on"
            else:
                outcome, detail = report.explain_death(status)
            return Death(outcome=outcome, detail=detail, running=report.running)
        except TrialFailed as failure:
            wrong = str(failure)
        else:
            is_foreign = wanted is not None and isinstance(result, GemmTunerError)
            is_foreign = is_foreign and not isinstance(result, _ERRORS)
            wrong = f"sent what is no answer: {type(result).__name__}" if is_foreign else ""
    os.kill(child, signal.SIGKILL)  # it has nothing left to do
    os.waitpid(child, 0)
    if wrong:
        return Death(outcome=Outcome.CRASHED, detail=wrong, running=report.running)
    if isinstance(result, GemmTunerError):
        raise result
    return cast("Result", result)


@contextmanager
def _deadline(child: int, seconds: float) -> Iterator[Callable[[], bool]]:
    """End a child that begins to answer and does not go on; say whether that was so."""
    ended: list[int] = []

    def end(_number: int, _frame: object) -> None:
        os.kill(child, signal.SIGKILL)
        ended.append(child)

    handler = signal.signal(signal.SIGALRM, end)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield lambda: bool(ended)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _status_of(child: int, seconds: float) -> int | None:
    """Return the status of a child that says nothing more, None if it had to be ended."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(_POLL_S / 10)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _take_rights_away(guard: Guard) -> None:
    """Limit this process, and let it write to no terminal or log.

    Raises:
        TrialFailed: Linux does not.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, _STANDARD_ERROR)
    os.close(nowhere)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + available_memory_bytes() + _SPARE_BYTES
    for limit, value in ((resource.RLIMIT_AS, most), (resource.RLIMIT_CPU, _CPU_LIMIT_S)):
        highest = resource.getrlimit(limit)[1]
        chosen = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(limit, (chosen, chosen))
    if not refuse_system_calls(guard.answer, threads=guard.threads, programs=guard.programs):
        raise TrialFailed("Linux does not filter system calls here; set GEMM_TUNER_SANDBOX=off.")


def _live(
    task: Callable[[], object],
    report: Report,
    writer: Connection,
    wanted: Any,  # noqa: ANN401 - a type
    guard: Guard | None,
) -> None:
    """Do the task and end the process, without the exit handlers that belong to its parent."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        report.watch()
        result: object
        try:
            if guard is not None:
                _take_rights_away(guard)
            result = task()
        except GemmTunerError as error:
            result = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
            result = TrialFailed(f"the trial broke: {error!r}; please report this.")
        if wanted is None:
            writer.send(result)
        else:
            send(writer, result, wanted)
    finally:
        os._exit(0)


def _wait_for_result(
    reader: Connection,
    child: int,
    report: Report,
    owner: Connection,
    *,
    stall_timeout_s: float,
    longest_s: float,
) -> str | None:
    """Wait until the child has answered or died; end it and return how it hangs if it does."""
    began_s = last_step_s = time.monotonic()
    steps = report.steps
    while True:
        ready = wait([reader, owner], timeout=_POLL_S)
        if reader in ready:
            return None
        if owner in ready:
            os.kill(child, signal.SIGKILL)
            sys.exit(0)
        now_s = time.monotonic()
        if report.steps != steps:
            steps, last_step_s = report.steps, now_s
        detail = None
        idle_s = now_s - last_step_s
        if idle_s > stall_timeout_s and idle_s > stall_timeout_s + waited_for_core_s(child):
            detail = f"did nothing for {stall_timeout_s:g} s"
        elif now_s - began_s > longest_s:
            detail = f"came to no end in {longest_s:g} s"
        if detail is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return detail
