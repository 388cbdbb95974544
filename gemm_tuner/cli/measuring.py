"""One process of a user measures on a machine at a time; a command waits for a worker that does."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gemm_tuner.cli.output import print_message
from gemm_tuner.machine.measuring_lock import MeasuringLock

_LOOK_EVERY_S = 0.5


@contextmanager
def measuring(is_stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Keep workers and other commands of this user from measuring while the context is open.

    It waits for one that does, and says so, until `is_stopped`.

    Raises:
        StoreFailed: the file of the lock cannot be made.
    """
    lock = MeasuringLock()
    if not lock.acquire():
        print_message("Waiting for another process of yours that measures on this machine.")
        while not is_stopped() and not lock.acquire():
            time.sleep(_LOOK_EVERY_S)
    try:
        yield
    finally:
        lock.release()
