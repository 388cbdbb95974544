"""One thread of a client, which has problems tuned and swaps their kernels in."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any
from weakref import WeakMethod, finalize, ref

from gemm_tuner.client.connection import Deadline
from gemm_tuner.client.question import Question
from gemm_tuner.client.swapped import AnyKernel, SwappedKernel
from gemm_tuner.client.tuning import LONGEST_TUNE_S, Begin, Ended, Follower, pauses
from gemm_tuner.errors import ServiceUnreachable
from gemm_tuner.machine.forks import tell_of_forks
from gemm_tuner.runtime.load import Kernel

MAX_PENDING = 1000
LONGEST_PAUSE_S = 5.0
LONGEST_FETCH_PAUSE_S = 60.0  # of a kernel whose download failed: it may be some megabytes
FIRST_ANSWER_S = 60.0  # a service that restarts is back by then
AGAIN_S = 600.0  # a problem whose tuning brought no kernel is not asked for again for so long

_CLIENT_LOOK_S = 1.0  # between two looks whether there is a client still
_BEING_TUNED = "It is being tuned, and until then:"

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A kernel that may be swapped, who follows its job, how that ended, and when to look again."""

    kernel: SwappedKernel
    follower: Follower
    ended: Ended | None = None
    pauses: Iterator[float] = field(default_factory=lambda: pauses(LONGEST_PAUSE_S))
    at_s: float = 0.0

    def wait(self) -> None:
        """Look again after the next pause."""
        self.at_s = time.monotonic() + next(self.pauses)


class Background:
    """The problems that one client has tuned in the background.

    `begin` begins an ask of the service, and `fetch` returns what it now has for a question, in the
    place of what it had: both are methods of the client, which is not kept alive by them. The
    thread runs while something is pending, and ends with the client. Each problem is given up after
    `LONGEST_TUNE_S`, or when the service did not answer at all for `FIRST_ANSWER_S`.
    """

    def __init__(self, begin: Begin, fetch: Callable[[Question, AnyKernel], AnyKernel]) -> None:
        self._begin = WeakMethod(begin)
        self._fetch = WeakMethod(fetch)
        self._pending: dict[Question, _Pending] = {}
        self._ended: dict[Question, float] = {}
        self._lock = Lock()
        self._woken = Event()
        self._thread: Thread | None = None
        tell_of_forks(self)
        finalize(self, _settle_all, self._pending).atexit = False

    def after_fork(self) -> None:
        """Do without the thread of the parent until the next problem."""
        self._lock = Lock()
        self._woken = Event()
        self._thread = None

    def pending(self, question: Question) -> SwappedKernel | None:
        """Return the kernel for a question that is being tuned, None if it is not."""
        with self._lock:
            one = self._pending.get(question)
            if one is None:
                return None
            if self._thread is None:  # this is a forked child
                self._start()
            return one.kernel

    def tune(
        self, question: Question, request: dict[str, Any], kernel: AnyKernel
    ) -> AnyKernel | SwappedKernel:
        """Return what computes as `kernel` until the problem was tuned.

        It is `kernel` itself where the problem was asked for within `AGAIN_S`, or too many are
        pending.
        """
        with self._lock:
            if (known := self._pending.get(question)) is not None:
                return known.kernel
            if time.monotonic() < self._ended.get(question, 0.0):
                return kernel
            if len(self._pending) >= MAX_PENDING:
                _LOG.warning("%s is not tuned: %d are already.", question.problem, MAX_PENDING)
                return kernel
            swapped = SwappedKernel(kernel, _BEING_TUNED)
            follower = Follower(request, Deadline(LONGEST_TUNE_S), first=Deadline(FIRST_ANSWER_S))
            self._pending[question] = _Pending(kernel=swapped, follower=follower)
            self._woken.set()
            if self._thread is None and not self._start():
                del self._pending[question]
                return kernel
        return swapped

    def _start(self) -> bool:
        thread = Thread(target=_run, args=(ref(self),), name="gemm-tuner-background", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            return False
        self._thread = thread
        return True

    def look(self) -> float | None:
        """Look at what is due; return the seconds until the next look, None if nothing is left."""
        begin, fetch = self._begin(), self._fetch()
        if begin is None or fetch is None:
            return None
        for question, one in list(self._pending.items()):
            if time.monotonic() < one.at_s:
                continue
            try:
                if not _is_over(one, question, begin, fetch):
                    one.wait()
                    continue
            except Exception as error:  # noqa: BLE001 - or nothing would be looked at any more
                _LOG.warning("%s was not tuned", question.problem.text, exc_info=True)
                one.kernel.settle(one.kernel.kernel, f"It was not tuned: {error}")
            self._end(question)
        with self._lock:
            if not self._pending:
                self._thread = None
                return None
            next_s = min(one.at_s for one in self._pending.values())
        return max(0.0, next_s - time.monotonic())

    @property
    def woken(self) -> Event:
        """Return what is set when there is something new to look at."""
        return self._woken

    def _end(self, question: Question) -> None:
        with self._lock:
            del self._pending[question]
            self._ended.pop(question, None)
            if len(self._ended) >= MAX_PENDING:
                del self._ended[next(iter(self._ended))]  # the oldest
            self._ended[question] = time.monotonic() + AGAIN_S


def _is_over(
    one: _Pending,
    question: Question,
    begin: Begin,
    fetch: Callable[[Question, AnyKernel], AnyKernel],
) -> bool:
    """Look at a job; once it ended, swap in what the service then has, as soon as it tells that."""
    if one.ended is None:
        one.ended = one.follower.look(begin)
        if one.ended is None:
            return False
        one.pauses = pauses(LONGEST_FETCH_PAUSE_S)
    known, why = one.kernel.kernel, one.ended.why
    try:
        found = fetch(question, known) if one.ended.is_worth_asking else known
    except ServiceUnreachable as error:
        if one.follower.rest_s > 0:
            return False
        found, why = known, f"{why} {error}"
    _swap(one.kernel, found, why)
    return True


def _swap(swapped: SwappedKernel, found: AnyKernel, why: str) -> None:
    """Let compute for good what was found; `why` is told where that is no kernel.

    The same library goes on without packing weights again.
    """
    known = swapped.kernel
    if isinstance(found, Kernel) and found is not known:
        swapped.settle(found)
    else:
        swapped.settle(known if found.library == known.library else found, why)


def _run(background: "ref[Background]") -> None:
    """Look at what a client has tuned, until there is nothing left or no client."""
    while (own := background()) is not None:
        woken = own.woken
        woken.clear()
        pause_s = own.look()
        if pause_s is None:
            return
        del own
        woken.wait(min(pause_s, _CLIENT_LOOK_S))


def _settle_all(pending: dict[Question, _Pending]) -> None:
    """Let compute for good what computes now, so that no copies of weights are kept."""
    for one in pending.values():
        one.kernel.settle(one.kernel.kernel, "It was not tuned: its client is gone.")
