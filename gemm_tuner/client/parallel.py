"""The same for many questions, in as many threads as there may be connections to a service."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gemm_tuner.client.transport import MAX_CONNECTIONS

Item = TypeVar("Item")
Result = TypeVar("Result")


def each_at_once(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    give_up: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Return what `work` returns for each item, in their order.

    When this is interrupted, or one fails, no more are begun, and `give_up` is called, so that
    those which are being worked on need not come to their end.
    """
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        try:
            results = pool.map(work, items)
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            return [work(item) for item in items]
        try:
            return list(results)
        except BaseException:
            give_up()
            raise
