"""How far a sweep is: what its caller is told while it runs."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isinf

from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import duration_text

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a sweep is: `done` of about `total` candidates, the best speed over the baseline's.

    `remaining_s` is what is left of the budget for all contexts, infinite where it is not known how
    long something else takes. Of the candidates that are done,
    some `failed`; a call of the best takes `best_ns`.
    """

    stage: str
    done: int
    total: int
    best_ratio: float | None
    remaining_s: float
    failed: int = 0
    best_ns: float | None = None

    def note(self, later_s: float = 0.0) -> str:
        """Return the best speed and the time left, with that of what comes after it, in words."""
        left_s = self.remaining_s + later_s
        if isinf(left_s):
            return "for how long is not known"
        over = "finishing" if self.done < self.total else "at its end"
        left = f"{duration_text(left_s)} left" if left_s > 0 else over
        return left if self.best_ratio is None else f"best {self.best_ratio:.2f} x baseline, {left}"


def waiting(text: str) -> Progress:
    """Return the step of a sweep that is waiting for what `text` says, nobody knows how long."""
    return Progress(stage=text, done=0, total=1, best_ratio=None, remaining_s=inf)


class ProgressLog:
    """Tells a program that waits for tuning how far it is, now and then.

    A line goes to the log of `gemm_tuner.tuning.progress` where the program has set up logging, and
    to stderr where it has not.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the clock, in seconds."""
        self._clock = clock
        self._problem: Problem | None = None
        self._last_s = 0.0

    def show(self, problem: Problem, step: Progress) -> None:
        """Tell the first step of a problem, and then one every ten seconds."""
        now_s = self._clock()
        if problem == self._problem and now_s - self._last_s < _INTERVAL_S:
            return
        self._problem, self._last_s = problem, now_s
        text = f"tuning {problem.text}: {step.stage}, {step.note()}"
        if _LOG.hasHandlers():
            _LOG.info(text)
        else:
            sys.stderr.write(f"gemm-tuner: {text}\n")
            sys.stderr.flush()
