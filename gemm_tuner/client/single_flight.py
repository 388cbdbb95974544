"""Find a thing once for all threads that want it, and different things in parallel."""

import time
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from threading import Lock
from typing import Generic, TypeVar

from gemm_tuner.machine.forks import tell_of_forks

MAX_BRIEF = 1000

Question = TypeVar("Question", bound=Hashable)
Found = TypeVar("Found")


class Once(Generic[Question, Found]):
    """The answers found so far, one for each question.

    What `is_final` accepts is kept as long as it `holds`, and all else for `brief_s`, at most
    `MAX_BRIEF` of them; then it is looked for again. The lock is never held while something is
    looked for. A forked child keeps what was found, and looks anew for what threads of its parent
    looked for.
    """

    def __init__(
        self,
        is_final: Callable[[Found], bool],
        *,
        holds: Callable[[Found], bool] = lambda _found: True,
        brief_s: float = 0.0,
    ) -> None:
        self._is_final = is_final
        self._holds = holds
        self._brief_s = brief_s
        self._known: dict[Question, Found] = {}
        self._brief: dict[Question, tuple[float, Found]] = {}
        self._pending: dict[Question, Future[Found]] = {}
        self._lock = Lock()
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Forget who looks: after a fork, those threads are in another process."""
        self._pending = {}
        self._lock = Lock()

    def find(
        self, question: Question, look: Callable[[], Found], *, old: Found | None = None
    ) -> Found:
        """Return the known answer, or that of `look`; one thread looks, and the others wait for it.

        An error of `look` is raised in all of them. An `old` answer does not count as known.
        """
        while True:
            known = self.known(question)
            if known is not None and known is not old:
                return known
            with self._lock:
                pending = self._pending.get(question)
                if pending is None:
                    mine = self._pending[question] = Future[Found]()
                    break
            try:
                return pending.result()
            except CancelledError:
                continue  # the thread that looked was interrupted
        return self._look(question, look, mine, old)

    def forget_brief(self) -> None:
        """Forget every answer that is not final."""
        with self._lock:
            self._brief = {}

    def _keep(self, question: Question, found: Found) -> None:
        if self._is_final(found):
            self._known[question] = found
        elif self._brief_s > 0:
            self._keep_briefly(question, found)

    def known(self, question: Question) -> Found | None:
        """Return the known answer, None if it is to be looked for."""
        known = self._known.get(question)
        if known is not None and self._holds(known):
            return known
        until_s, found = self._brief.get(question, (0.0, None))
        return found if time.monotonic() < until_s else None

    def _keep_briefly(self, question: Question, found: Found) -> None:
        with self._lock:
            self._brief.pop(question, None)
            if len(self._brief) >= MAX_BRIEF:
                del self._brief[next(iter(self._brief))]  # the oldest
            self._brief[question] = (time.monotonic() + self._brief_s, found)

    def _look(
        self,
        question: Question,
        look: Callable[[], Found],
        mine: "Future[Found]",
        old: Found | None,
    ) -> Found:
        try:
            # Another thread may have found it before this one took the lock.
            known = self.known(question)
            found = look() if known is None or known is old else known
            if known is not found or self._is_final(found):
                self._keep(question, found)
            mine.set_result(found)
        except Exception as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._pending[question]
            mine.cancel()  # does nothing unless this thread was interrupted
        return found
