"""A command waits for a worker, or another command, that measures, and says so."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from gemm_tuner.cli.output import print_message
from gemm_tuner.machine import measuring_lock


def measuring(is_stopped: Callable[[], bool] = lambda: False) -> AbstractContextManager[None]:
    """Keep workers and other commands of this user from measuring while the context is open.

    Raises:
        StoreFailed: the file of the lock cannot be made.
    """
    return measuring_lock.measuring(is_stopped, print_message)
