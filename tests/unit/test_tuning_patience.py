"""How long a sweep waits for idle cores."""

from collections.abc import Iterator

from gemm_tuner.tuning.patience import Patience


class Clock:
    """A clock that goes on by a second whenever the machine is looked at."""

    def __init__(self, idle: Iterator[float | None]) -> None:
        self.now_s = 0.0
        self._idle = idle

    def look(self) -> float | None:
        self.now_s += 1.0
        return next(self._idle)

    def __call__(self) -> float:
        return self.now_s


def waits(patience: Patience) -> tuple[bool, int]:
    """Return what came of waiting, and how often that was told."""
    told: list[int] = []
    return patience.wait(is_stopped=lambda: False, on_wait=lambda: told.append(1)), len(told)


def make_patience(clock: Clock, *, budget_s: float = 10.0, threads: int = 2) -> Patience:
    return Patience(budget_s=budget_s, threads=threads, idle_cores=clock.look, clock=clock)


def test_a_sweep_goes_on_when_there_are_idle_cores() -> None:
    clock = Clock(iter([0.1, 1.0, 1.9]))

    assert waits(make_patience(clock)) == (True, 3)


def test_patience_ends_and_does_not_come_back() -> None:
    clock = Clock(iter([0.0] * 5))
    patience = make_patience(clock)

    assert patience.remaining_s == 0
    assert waits(patience) == (False, 5)
    assert waits(patience) == (False, 0)


def test_patience_is_counted_from_the_first_disturbance_on() -> None:
    clock = Clock(iter([2.0, 2.0]))
    patience = make_patience(clock)
    clock.now_s = 1000.0

    assert waits(patience) == (True, 1)
    assert patience.remaining_s == 4
    clock.now_s += 3.0
    assert waits(patience) == (False, 1)


def test_one_thread_needs_one_core() -> None:
    assert waits(make_patience(Clock(iter([0.9])), threads=1)) == (True, 1)


def test_a_system_that_tells_nothing_is_not_waited_for() -> None:
    assert waits(make_patience(Clock(iter([None])))) == (True, 1)


def test_a_user_who_stops_does_not_wait() -> None:
    patience = make_patience(Clock(iter([0.0])))

    assert not patience.wait(is_stopped=lambda: True, on_wait=lambda: None)
