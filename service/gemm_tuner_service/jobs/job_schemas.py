"""What requests for jobs, and answers about them and about misses, look like."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, Field

from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.job import (
    DEFAULT_BUDGET_S,
    GREATEST_PRIORITY,
    LEAST_PRIORITY,
    MAX_BUDGET_S,
    Job,
    JobProgress,
    JobState,
)
from gemm_tuner.store.jobs.misses import MissCount
from gemm_tuner_service.schemas import Integer, Resolution, ResolveRequest

LEAST_BUDGET_S = 0.5


class Tuning(StrEnum):
    """What to do about a question without an answer that was measured."""

    AUTO = "auto"  # let it be tuned


class JobRequest(ResolveRequest):
    """What to tune: a problem, CPU and context, as in a question for a kernel.

    `budget_s` are the seconds to spend. Of the jobs that wait, the one with the greatest `priority`
    is run first. With `dry_run` nothing is tuned: the answer is what it would take.
    """

    budget_s: Annotated[float, Field(strict=True, ge=LEAST_BUDGET_S, le=MAX_BUDGET_S)] = (
        DEFAULT_BUDGET_S
    )
    priority: Annotated[Integer, Field(ge=LEAST_PRIORITY, le=GREATEST_PRIORITY)] = 0
    dry_run: Annotated[bool, Field(strict=True)] = False


class ProgressView(BaseModel):
    """How far a job is: candidates that were tried, how many of them failed, and the best.

    `best_ns` is the time of one call of the best, `over_baseline` its speed over that of the
    baseline, and `seconds_left` what is left of the budget. Null is not known yet.
    """

    tried: int
    failed: int
    best_ns: float | None
    over_baseline: float | None
    seconds_left: float | None

    @classmethod
    def of(cls, progress: JobProgress) -> Self:
        """Return the view of `progress`."""
        return cls(
            tried=progress.tried,
            failed=progress.failed,
            best_ns=progress.best_ns,
            over_baseline=progress.over_baseline,
            seconds_left=progress.seconds_left,
        )


class JobEvent(BaseModel):
    """What an event of a job says: its state, and how far it is."""

    state: JobState
    progress: ProgressView
    detail: str

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return what there is to say of `job` now."""
        return cls(state=job.state, progress=ProgressView.of(job.progress), detail=job.detail)


class JobView(JobEvent):
    """A job. `url` is where to ask for it again, and `revision` grows with each change.

    `attempts` counts the workers that began it. Where `is_cancel_asked`, its worker ends it soon.
    `detail` says what came out, or why it failed. Where it `has_worker` not, no worker for such
    CPUs was heard of within the last minute: the job waits until one comes. Times are in UTC.
    """

    id: str
    url: str
    problem: str
    class_key: str
    threads: int
    regime: Regime
    budget_s: float
    priority: int
    created_at: datetime
    changed_at: datetime
    attempts: int
    revision: int
    is_cancel_asked: bool
    has_worker: bool

    @classmethod
    def of_job(cls, job: Job, *, has_worker: bool) -> Self:
        """Return the view of `job`."""
        return cls(
            state=job.state,
            progress=ProgressView.of(job.progress),
            detail=job.detail,
            id=job.id,
            url=url_of(job),
            problem=job.problem.text,
            class_key=job.class_key,
            threads=job.context.threads,
            regime=job.context.regime,
            budget_s=job.budget_s,
            priority=job.priority,
            created_at=job.created_at,
            changed_at=job.changed_at,
            attempts=job.attempts,
            revision=job.revision,
            is_cancel_asked=job.is_cancel_asked,
            has_worker=has_worker,
        )


class JobsPage(BaseModel):
    """Jobs, the newest first."""

    jobs: list[JobView]


class EstimateView(BaseModel):
    """What a job would take: candidates in the space, and the longest time.

    `estimated_seconds` is null where this service cannot tell.
    """

    candidates: int
    estimated_seconds: float | None


class PendingResolution(Resolution):
    """The answer for now, and the job that is to find a better one."""

    job: JobView


class MissView(BaseModel):
    """A question without a measured answer, how often it was asked, and when first and last."""

    problem: str
    class_key: str
    threads: int
    regime: Regime
    count: int
    first_at: datetime
    last_at: datetime

    @classmethod
    def of(cls, miss: MissCount) -> Self:
        """Return the view of `miss`."""
        return cls(
            problem=miss.problem.text,
            class_key=miss.class_key,
            threads=miss.context.threads,
            regime=miss.context.regime,
            count=miss.count,
            first_at=miss.first_at,
            last_at=miss.last_at,
        )


class MissesPage(BaseModel):
    """Questions without a measured answer, what was asked most first."""

    misses: list[MissView]


def url_of(job: Job) -> str:
    """Return the path of a job."""
    return f"/v1/jobs/{job.id}"
