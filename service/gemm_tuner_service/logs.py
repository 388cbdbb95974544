"""A log of bounded volume: requests cannot fill a disk with messages."""

import logging
import re
import time
from collections.abc import Callable
from typing import TextIO

from gemm_tuner.domain.access import PREFIX
from gemm_tuner.domain.printable import harmless
from gemm_tuner_service.request_ids import REQUEST_ID

BURST = 100
PER_MINUTE = 20
ACCESS_BURST = 2000
ACCESS_PER_MINUTE = 1200
MAX_RECORD_CHARACTERS = 4000
ACCESS_LOGGER = "gemm_tuner_service.access_log"

_LOGGERS = ("uvicorn", "asyncio", "gemm_tuner_service")
_SECRET = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{20,}}")


def without_tokens(text: str, shown: str = f"{PREFIX}…") -> str:
    """Return `text` with `shown` in the place of each token."""
    return _SECRET.sub(shown, text)


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Writes at most `BURST` records at once and `PER_MINUTE` afterwards, each cut to a length.

    How many were left out is said before the next one. What callers sent is in some: it is written
    without tokens, and with its control characters spelled.
    """

    burst = BURST
    per_minute = PER_MINUTE

    def __init__(
        self, stream: TextIO | None = None, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream)
        self._now_s = now_s
        self._room = float(self.burst)
        self._last_s = now_s()
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless there were too many."""
        now_s = self._now_s()
        self._room = min(self.burst, self._room + (now_s - self._last_s) * self.per_minute / 60)
        self._last_s = now_s
        if self._room < 1:
            self._left_out += 1
            return
        self._room -= 1
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, cut, and how many were left out before it."""
        text = without_tokens(super().format(record))
        if len(text) > MAX_RECORD_CHARACTERS:
            text = f"{text[:MAX_RECORD_CHARACTERS]} … cut"
        text = harmless(text)
        left_out, self._left_out = self._left_out, 0
        return f"{self.omission(left_out)}\n{text}" if left_out else text

    def omission(self, left_out: int) -> str:
        """Return the line that says how many were left out."""
        return f"({left_out} messages were left out)"


class AccessLogHandler(BoundedHandler):
    """Writes the access log: more lines than of messages, and each is JSON."""

    burst = ACCESS_BURST
    per_minute = ACCESS_PER_MINUTE

    def omission(self, left_out: int) -> str:
        """Return the line that says how many were left out."""
        return f'{{"left_out": {left_out}}}'

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - its name in logging
        """Go on: that nobody reads the log is no reason to write more."""


class _WithRequestId(logging.Filter):
    """Adds the id of the request that a message is about."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = REQUEST_ID.get()
        return True


def log_access(handler: logging.Handler) -> None:
    """Send the access log to `handler`."""
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger(ACCESS_LOGGER)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def bound_logs(handler: logging.Handler | None = None) -> None:
    """Send what the service and its server say to `handler`, by default a bounded one on stderr."""
    chosen = handler or BoundedHandler()
    chosen.addFilter(_WithRequestId())
    chosen.setFormatter(logging.Formatter("%(levelname)s %(name)s [%(request_id)s]: %(message)s"))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [chosen]
        logger.propagate = False
