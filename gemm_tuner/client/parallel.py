"""The same for many questions, in as many threads as there may be connections to a service."""

from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Generic, TypeVar

from gemm_tuner.client.transport import MAX_CONNECTIONS

# A signal that arrives just before the main thread begins to wait does not end that wait.
_HEARD_WITHIN_S = 0.5

Item = TypeVar("Item")
Result = TypeVar("Result")


def each_at_once(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    give_up: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Return what `work` returns for each item, in their order.

    When this is interrupted, or one fails, no more are begun, and `give_up` is called, so that
    those which are being worked on need not come to their end. A program that ends waits for none
    of them, which an executor of the standard library would make it do.
    """
    if len(items) == 1:
        return [work(items[0])]
    work_in_turn = _Work(work, items, give_up)
    threads = [
        Thread(target=work_in_turn.go_on, daemon=True)
        for _ in range(min(len(items), MAX_CONNECTIONS))
    ]
    try:
        try:
            for thread in threads:
                thread.start()
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            work_in_turn.go_on()
        for thread in threads:
            while thread.is_alive():
                thread.join(_HEARD_WITHIN_S)
    except BaseException as error:
        work_in_turn.fail(error)
        raise
    return work_in_turn.all_results()


class _Work(Generic[Item, Result]):
    """What several threads do, each the next item that none has begun."""

    def __init__(
        self, work: Callable[[Item], Result], items: Sequence[Item], give_up: Callable[[], None]
    ) -> None:
        self._work, self._items, self._give_up = work, items, give_up
        self._lock = Lock()
        self._left = iter(range(len(items)))
        self._results: dict[int, Result] = {}
        self._failure: BaseException | None = None

    def go_on(self) -> None:
        """Do one item after the other, until there is none or one fails."""
        while self._failure is None:
            with self._lock:
                place = next(self._left, None)
            if place is None:
                return
            try:
                self._results[place] = self._work(self._items[place])
            except BaseException as error:  # noqa: BLE001 - raised where all are waited for
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Begin no more, and give up those that are worked on, unless one failed before."""
        with self._lock:
            is_first = self._failure is None
            self._failure = self._failure or error
        if is_first:
            self._give_up()

    def all_results(self) -> list[Result]:
        """Return the results, in the order of the items, or raise what failed first."""
        if self._failure is not None:
            raise self._failure
        return [self._results[place] for place in range(len(self._items))]
