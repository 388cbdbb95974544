"""Ctrl-C and the like: the first asks to stop and keep what there is, the second aborts."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

import typer

_STANDARD_ERROR = 2
_NOTICE = b"Stopping after the trial in flight, if any; press Ctrl-C again to abort.\n"


@contextmanager
def aborting(*signals: signal.Signals) -> Iterator[None]:
    """Let Ctrl-C end a command with a line; of KeyboardInterrupt, typer makes a silent end.

    So do `signals`, which would else end it with nothing cleaned up.

    Raises:
        Abort: Ctrl-C was pressed, or one of the signals came.
    """
    before = [(one, signal.signal(one, signal.default_int_handler)) for one in signals]
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Abort from None
    finally:
        for one, handler in before:
            signal.signal(one, handler)


class StopOnInterrupt:
    """Turn the first of some signals into a flag while the context is open; SIGINT alone if none.

    `notice` is what is said at once to whoever sent it.
    """

    def __init__(self, *signals: signal.Signals, notice: bytes = _NOTICE) -> None:
        self._signals = signals or (signal.SIGINT,)
        self._notice = notice
        self._is_stopped = False

    def __enter__(self) -> Self:
        for each in self._signals:
            signal.signal(each, self._stop)
        return self

    def __exit__(self, *_error: object) -> None:
        for each in self._signals:
            signal.signal(each, signal.default_int_handler)

    def is_stopped(self) -> bool:
        """Return whether the user asked to stop."""
        return self._is_stopped

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        if self._is_stopped:
            raise KeyboardInterrupt
        self._is_stopped = True
        # Not print(): what was interrupted may be printing, and its buffer admits nobody else.
        with suppress(OSError):  # whoever read it is gone: what is in flight goes on
            os.write(_STANDARD_ERROR, self._notice)
