"""Of a call on one thread, what it computed counts, and not what it waited for a core."""

import pytest

from gemm_tuner.machine.core_clock import CoreClock


@pytest.mark.parametrize(
    ("threads", "counted"),
    [(1, 300), (2, 1000), (None, 1000)],
)
def test_a_thread_that_waited_for_a_core_was_not_slow(threads: int | None, counted: int) -> None:
    clock = CoreClock(threads, iter([50, 350]).__next__)

    clock.start()

    assert clock.counted_ns(1000) == counted


def test_no_call_takes_longer_than_it_did() -> None:
    """A coarse clock of the processor may count more than passed."""
    clock = CoreClock(1, iter([0, 4_000_000]).__next__)
    clock.start()

    assert clock.counted_ns(1000) == 1000
