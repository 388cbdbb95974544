"""A log of bounded volume: requests cannot fill a disk with messages."""

import logging
import time
from collections.abc import Callable
from typing import TextIO

BURST = 100
PER_MINUTE = 20
MAX_RECORD_CHARACTERS = 4000

_LOGGERS = ("uvicorn", "asyncio", "gemm_tuner_service")


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Writes at most `BURST` records at once and `PER_MINUTE` afterwards, each cut to a length.

    How many were left out is said before the next one.
    """

    def __init__(
        self, stream: TextIO | None = None, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream)
        self._now_s = now_s
        self._room = float(BURST)
        self._last_s = now_s()
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless there were too many."""
        now_s = self._now_s()
        self._room = min(BURST, self._room + (now_s - self._last_s) * PER_MINUTE / 60)
        self._last_s = now_s
        if self._room < 1:
            self._left_out += 1
            return
        self._room -= 1
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, cut, and how many were left out before it."""
        text = super().format(record)
        if len(text) > MAX_RECORD_CHARACTERS:
            text = f"{text[:MAX_RECORD_CHARACTERS]} … cut"
        left_out, self._left_out = self._left_out, 0
        return f"({left_out} messages were left out)\n{text}" if left_out else text


def bound_logs(handler: logging.Handler | None = None) -> None:
    """Send what the service and its server say to `handler`, by default a bounded one on stderr."""
    chosen = handler or BoundedHandler()
    chosen.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [chosen]
        logger.propagate = False
