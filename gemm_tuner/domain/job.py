"""A job: a problem that somebody asked to be tuned, and how far that is."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidSetting

DEFAULT_BUDGET_S = 30.0
MAX_BUDGET_S = 3600.0
LEAST_PRIORITY = -100
GREATEST_PRIORITY = 100


class JobState(StrEnum):
    """Where a job is: it waits, is run by a worker, or is over in one of three ways."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"  # the store holds a verdict that was measured
    FAILED = "failed"
    CANCELLED = "cancelled"  # what was found until then is kept

    @property
    def is_over(self) -> bool:
        """Return whether the job never changes again."""
        return self in {JobState.DONE, JobState.FAILED, JobState.CANCELLED}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """How far a job is: candidates that were tried, how many of them failed, and the best.

    `best_ns` is the time of one call of the best, `over_baseline` its speed over that of the
    baseline, and `seconds_left` what is left of the budget. None is not known yet.
    """

    tried: int = 0
    failed: int = 0
    best_ns: float | None = None
    over_baseline: float | None = None
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A problem to be tuned for CPUs of a class, as one row of the store.

    `class_key` is that of `Cpu`, `budget_s` the seconds to spend. Of those that wait, the greatest
    `priority` is run first. `owner` asked for it: the id of a token, or a user. `attempts` counts
    the workers that began it. `revision` grows with each change. Where `is_cancel_asked`, its
    worker ends it soon. `detail` says what came out, or why it failed. The hosts with the measuring
    keys in `measured_by` need not run it: another is to find the same. Times have a zone.
    """

    id: str
    problem: Problem
    class_key: str
    context: ExecutionContext
    budget_s: float
    priority: int
    state: JobState
    owner: str
    created_at: datetime
    changed_at: datetime
    worker: str | None = None
    attempts: int = 0
    progress: JobProgress = field(default=JobProgress())
    revision: int = 1
    is_cancel_asked: bool = False
    detail: str = ""
    measured_by: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check the budget and the priority."""
        if not 0 < self.budget_s <= MAX_BUDGET_S:
            raise InvalidSetting(
                f"budget {self.budget_s:g} s cannot be used; "
                f"give a positive time of at most {MAX_BUDGET_S:g} s."
            )
        if not LEAST_PRIORITY <= self.priority <= GREATEST_PRIORITY:
            raise InvalidSetting(
                f"priority {self.priority} is out of range; "
                f"use {LEAST_PRIORITY} to {GREATEST_PRIORITY}."
            )
