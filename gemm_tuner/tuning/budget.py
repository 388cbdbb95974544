"""The time that a sweep may take, and what of it each context gets."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from gemm_tuner.domain.problem import Problem

# Of a call; memory that one core reads at this rate is slow for a server.
_LITTLE_TO_READ = 0.03
_SLOW_MEMORY_BYTES_PER_S = 8e9
_SHARE_OF_ALIKE = 0.5


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
        """Return a budget of one of `parts` equal shares of the rest, starting now."""
        return Budget(seconds=self.remaining_s / parts, clock=self.clock)


def share_of_first(
    whole: Budget, contexts: int, problem: Problem, *, baseline_call_s: float
) -> Budget:
    """Return the share of the first of some `contexts` in the time left; the others get the rest.

    Where the arithmetic of a call takes far longer than to read the weights from memory, regimes
    differ little, and the best of one need only be timed in the others: each gets half as much.
    """
    is_alike = problem.w_bytes < _LITTLE_TO_READ * _SLOW_MEMORY_BYTES_PER_S * baseline_call_s
    return whole.share(1 + (contexts - 1) * (_SHARE_OF_ALIKE if is_alike else 1.0))
