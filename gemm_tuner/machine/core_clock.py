"""The time of calls, as it would be on a machine that does nothing else."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import thread_time_ns


@dataclass(slots=True)
class CoreClock:
    """Takes the time of calls on a number of threads, None for as many as there are.

    Of calls on one thread, the time on a core counts: on a busy machine a thread waits for a core
    as long as it computes, and chance would say which of two calls is the faster. Of several
    threads, only the elapsed time says when the last is ready.
    """

    threads: int | None
    cpu_ns: Callable[[], int] = thread_time_ns
    _begin_ns: int = field(default=0, init=False)

    def start(self) -> None:
        """Begin, in the thread that calls."""
        self._begin_ns = self.cpu_ns()

    def counted_ns(self, elapsed_ns: float) -> float:
        """Return what counts since the start of calls that took so long, in ns."""
        if self.threads != 1:
            return elapsed_ns
        return min(elapsed_ns, self.cpu_ns() - self._begin_ns)
