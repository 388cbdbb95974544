"""Spans of time by a clock that may be set: forwards, and back."""

from datetime import datetime, timedelta


def is_within(now: datetime, begin: datetime, span: timedelta) -> bool:
    """Return whether `now` is in the span after `begin`; not so where the clock was set back.

    Who waits for a span to be over would else wait as much longer as the clock was set.
    """
    return begin <= now < begin + span
