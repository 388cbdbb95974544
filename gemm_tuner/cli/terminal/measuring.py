"""A command waits for a worker, or another command, that measures, and says so."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from gemm_tuner.cli.terminal.output import print_message
from gemm_tuner.machine import measuring_lock


def measuring(is_stopped: Callable[[], bool] = lambda: False) -> AbstractContextManager[None]:
    """Keep workers and other commands of this user from measuring while the context is open.

    Raises:
        PreparationStopped: it `is_stopped` while another measures.
        StoreFailed: the file of the lock cannot be made or locked.
    """
    return measuring_lock.measuring(is_stopped, _tell)


def _tell(text: str) -> None:
    print_message(f"{text[0].upper()}{text[1:]}.")
