"""The time that a sweep may take."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic


@dataclass(slots=True, kw_only=True)
class Budget:
    """Seconds to spend from now on, by a clock that can be replaced."""

    seconds: float
    clock: Callable[[], float] = monotonic
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self.started_s = self.clock()

    @property
    def remaining_s(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self.seconds - (self.clock() - self.started_s))

    def is_spent(self) -> bool:
        """Return whether no time is left."""
        return self.remaining_s <= 0.0

    def share(self, parts: float) -> "Budget":
        """Return a budget of one of `parts` equal shares of what is left, starting now."""
        return Budget(seconds=self.remaining_s / parts, clock=self.clock)
