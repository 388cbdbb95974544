"""Ask again, for a short while, when a service could not answer for a reason that passes.

Every question may be asked twice: none changes the service.
"""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type

from gemm_tuner.client.connection import Deadline
from gemm_tuner.errors import ServiceUnreachable

ATTEMPTS = 3
INVITED_ATTEMPTS = 100  # where the service says when to come back: many start at once

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0  # unless the service asked for more

Answer = TypeVar("Answer")


class NoAnswer(ServiceUnreachable):
    """Nothing came back at all."""


class Passing(ServiceUnreachable):
    """The service did not answer this time; `after_s` is how long it wants to be left alone."""

    def __init__(self, message: str, *, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class Dropped(NoAnswer, Passing):
    """The connection failed, which may pass."""


def ask_again(ask: Callable[[], Answer], deadline: Deadline) -> Answer:
    """Return what `ask` returns, which is called again when it raises `Passing`.

    It is called at most `ATTEMPTS` times, or `INVITED_ATTEMPTS` times while the service says when
    to come back. The pauses double, or are what the service asked for, and grow by a random part,
    so that callers who failed together do not come back together. A pause that would end after the
    deadline is not begun.

    Raises:
        Passing: it was raised each time.
    """

    def is_too_late(state: RetryCallState) -> bool:
        return state.upcoming_sleep >= deadline.rest_s()

    return Retrying(
        retry=retry_if_exception_type(Passing),
        wait=_pause_s,
        stop=lambda state: _is_last(state) or is_too_late(state),
        reraise=True,
    )(ask)


def _is_last(state: RetryCallState) -> bool:
    return state.attempt_number >= (ATTEMPTS if _asked_s(state) is None else INVITED_ATTEMPTS)


def _asked_s(state: RetryCallState) -> float | None:
    """Return how long the service asked to be left alone, None if it did not say."""
    error = state.outcome.exception() if state.outcome is not None else None
    return error.after_s if isinstance(error, Passing) else None


def _pause_s(state: RetryCallState) -> float:
    pause_s = min(_FIRST_PAUSE_S * 2.0 ** (state.attempt_number - 1), _LONGEST_PAUSE_S)
    pause_s = max(pause_s, _asked_s(state) or 0.0)
    return pause_s + random.uniform(0, max(_FIRST_PAUSE_S, pause_s / 4))  # noqa: S311 - no secret


def retry_after_s(header: str | None) -> float | None:
    """Return the seconds that a `Retry-After` asks for, as a number or a date; None if it is none.

    Source: RFC 9110, section 10.2.3.
    """
    if header is None:
        return None
    if header.strip().isascii() and header.strip().isdigit():
        return float(header)
    try:
        moment = parsedate_to_datetime(header)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    except (ValueError, OverflowError):  # of no calendar, or of no year that a date may have
        return None
