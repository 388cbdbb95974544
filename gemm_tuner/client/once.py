"""Find a thing once for all threads that want it, and different things in parallel."""

from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from threading import Lock
from typing import Generic, TypeVar

Question = TypeVar("Question", bound=Hashable)
Found = TypeVar("Found")


class Once(Generic[Question, Found]):
    """The answers found so far, one for each question.

    Only what `keeps` accepts is kept; what it does not is looked for again. The lock is never held
    while something is looked for.
    """

    def __init__(self, keeps: Callable[[Found], bool]) -> None:
        self._keeps = keeps
        self._known: dict[Question, Found] = {}
        self._pending: dict[Question, Future[Found]] = {}
        self._lock = Lock()

    def find(self, question: Question, look: Callable[[], Found]) -> Found:
        """Return the known answer, or that of `look`; one thread looks, and the others wait for it.

        An error of `look` is raised in all of them.
        """
        while True:
            known = self._known.get(question)
            if known is not None:
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
        return self._look(question, look, mine)

    def _look(self, question: Question, look: Callable[[], Found], mine: "Future[Found]") -> Found:
        try:
            # Another thread may have found it before this one took the lock.
            known = self._known.get(question)
            found = look() if known is None else known
            if self._keeps(found):
                self._known[question] = found
            mine.set_result(found)
        except Exception as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._pending[question]
            mine.cancel()  # does nothing unless this thread was interrupted
        return found
