"""How long a sweep waits for other work on the machine to end before it decides."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gemm_tuner.machine.processors import USUAL_LOAD_CORES, read_processor_times, use_since
from gemm_tuner.tuning.budget import Budget

# Of the budget, on top of it: for waiting and for measuring again.
_SHARE = 0.5
_LEAST_S = 2.0
_MOST_S = 20.0
_LOOK_S = 0.25


def idle_cores() -> float | None:
    """Watch the machine for a moment; return how many cores were idle, None if it is not known."""
    begin = read_processor_times()
    time.sleep(_LOOK_S)
    use = use_since(begin)
    return None if use is None else use.idle


@dataclass(slots=True, kw_only=True)
class Patience:
    """Time that a search may lose to other work, counted from the first disturbance on."""

    budget_s: float
    threads: int
    idle_cores: Callable[[], float | None] = field(default_factory=lambda: idle_cores)
    clock: Callable[[], float] = time.monotonic
    _left: Budget | None = field(default=None)

    @property
    def remaining_s(self) -> float:
        """Return what is left once there was a disturbance, in seconds; before it, 0."""
        return self._left.remaining_s if self._left else 0.0

    def wait(self, *, is_stopped: Callable[[], bool], on_wait: Callable[[], None]) -> bool:
        """Wait for as many idle cores as there are threads; return whether they are there in time.

        `on_wait` is called now and then.
        """
        if self._left is None:
            seconds = min(_MOST_S, max(_LEAST_S, _SHARE * self.budget_s))
            self._left = Budget(seconds=seconds, clock=self.clock)
        while not (self._left.is_spent() or is_stopped()):
            on_wait()
            idle = self.idle_cores()
            if idle is None or idle >= self.threads - USUAL_LOAD_CORES:
                return not self._left.is_spent()
        return False
