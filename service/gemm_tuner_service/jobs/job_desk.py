"""Jobs for callers: who may ask for which, see and cancel it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from threading import BoundedSemaphore
from typing import Self

from fastapi import HTTPException
from sqlalchemy import Engine

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.job import DEFAULT_BUDGET_S, Job, JobState
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.jobs.views import JobViews
from gemm_tuner_service.answering.answers import Asked
from gemm_tuner_service.clients.callers import Caller
from gemm_tuner_service.clients.client_limits import TooManyRequests
from gemm_tuner_service.jobs.job_schemas import JobView
from gemm_tuner_service.jobs.job_watch import JobWatch

# A question whose job did not bring an answer, such as on a busy machine, is tuned again by asking
# when this time has passed; until then, by `POST /v1/jobs` alone.
ASK_AGAIN = timedelta(hours=1)

# Who writes may wait for another writer, and holds a connection to the database meanwhile: most are
# for those who only read.
MAX_WRITERS = 4
# To count a space for many threads takes seconds of a thread that lets no other run meanwhile.
MAX_ESTIMATORS = 1
_LONGEST_WAIT_S = 1.0
_RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDesk:
    """The jobs of a service.

    A caller sees the jobs that they asked for; with `admin`, all of them. Who asks for what is in
    flight gets that job, and sees it too, but cancels it not.
    """

    jobs: Jobs
    views: JobViews
    watch: JobWatch
    writers: BoundedSemaphore
    estimators: BoundedSemaphore

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Return the desk for the jobs of a database."""
        views = JobViews(engine)
        return cls(
            jobs=Jobs(engine),
            views=views,
            watch=JobWatch(views.several),
            writers=BoundedSemaphore(MAX_WRITERS),
            estimators=BoundedSemaphore(MAX_ESTIMATORS),
        )

    def submit(
        self,
        asked: Asked,
        caller: Caller,
        *,
        budget_s: float = DEFAULT_BUDGET_S,
        priority: int = 0,
        idempotency_key: str | None = None,
        is_enough: Callable[[Job], bool] | None = None,
    ) -> tuple[Job, bool]:
        """Return the job for a question, and whether it is new; or the last one, if it `is_enough`.

        Raises:
            InvalidInput: the problem or the key cannot be used.
            JobsFull: too many jobs are in flight.
            TooManyRequests: the database is slow to write, and others wait for it.
        """
        with self._writing():
            job, is_new = self.jobs.submit(
                asked.problem,
                class_key=asked.cpu.class_key,
                context=asked.context,
                budget_s=budget_s,
                priority=priority,
                owner=caller.owner,
                idempotency_key=idempotency_key,
                now=datetime.now(UTC),
                is_enough=is_enough,
            )
            if job.owner != caller.owner:
                self.views.share(job, caller.owner)
        return job, is_new

    def tune(self, asked: Asked, caller: Caller) -> Job | None:
        """Return the job in flight for a question, made if need be, or one that ended just now.

        None where one came to its end a short while ago: another would not find more now.
        """

        def is_enough(last: Job) -> bool:
            is_recent = abs(datetime.now(UTC) - last.changed_at) < ASK_AGAIN
            is_in_vain = is_recent and _has_ended_in_vain(last, caller)
            return is_in_vain and not self._is_for_others(asked, last)

        last = self.last_of(asked)
        if last is not None and is_enough(last):
            return None
        return self.submit(asked, caller, is_enough=is_enough)[0]

    def _is_for_others(self, asked: Asked, last: Job) -> bool:
        """Return whether other hosts may bring what a quorum lacks since the last job."""
        found = self.jobs.withheld(
            asked.problem, class_key=asked.cpu.class_key, context=asked.context
        )
        return found.lacks_hosts and not found.keys <= last.measured_by

    def in_flight(self, asked: Asked) -> Job | None:
        """Return the job for a question that waits or runs, whoever asked for it."""
        last = self.last_of(asked)
        return None if last is None or last.state.is_over else last

    def last_of(self, asked: Asked) -> Job | None:
        """Return the job for a question that was asked for last."""
        return self.views.last_of(
            asked.problem, class_key=asked.cpu.class_key, context=asked.context
        )

    def find(self, job_id: str, caller: Caller) -> Job:
        """Return a job that a caller may see.

        Raises:
            HTTPException: there is none.
        """
        job = self.jobs.get(job_id)
        if job is None or not self.is_shown(job, caller):
            raise HTTPException(
                HTTPStatus.NOT_FOUND, f"there is no job {job_id} that this caller asked for."
            )
        return job

    def is_shown(self, job: Job, caller: Caller) -> bool:
        """Return whether a caller may see a job."""
        is_own = job.owner == caller.owner or Scope.ADMIN in caller.scopes
        return is_own or self.views.is_shared(job.id, caller.owner)

    def newest(
        self, caller: Caller, *, state: JobState | None, limit: int, before: str | None = None
    ) -> list[JobView]:
        """Return the newest jobs that a caller may see, or those before one of them."""
        owner = None if Scope.ADMIN in caller.scopes else caller.owner
        found = self.views.newest(limit, owner=owner, state=state, before=before)
        now = datetime.now(UTC)
        kinds = {(job.class_key, job.measured_by) for job in found}
        has_worker = {
            (one, keys): self.jobs.has_worker(one, now, measured_by=keys) for one, keys in kinds
        }
        return [
            JobView.of_job(job, has_worker=has_worker[job.class_key, job.measured_by])
            for job in found
        ]

    def cancel(self, job_id: str, caller: Caller) -> Job:
        """Cancel a job of a caller and return it; one that is over stays as it is.

        Raises:
            HTTPException: there is none, or another asked for it before.
        """
        job = self.find(job_id, caller)
        if job.owner != caller.owner and Scope.ADMIN not in caller.scopes:
            raise HTTPException(
                HTTPStatus.FORBIDDEN,
                "another caller asked for this job before; only they or an admin can cancel it.",
            )
        with self._writing():
            return self.jobs.cancel(job_id, datetime.now(UTC)) or job

    def estimating(self) -> AbstractContextManager[None]:
        """Hold a place to estimate a job in while the context is open.

        Raises:
            TooManyRequests: others estimate, and take long.
        """
        return _place_among(self.estimators, "other estimates take long; ask again later.")

    def _writing(self) -> AbstractContextManager[None]:
        return _place_among(self.writers, "the database is slow to write jobs; ask again later.")

    def view(self, job: Job) -> JobView:
        """Return what a caller is told of a job."""
        has_worker = self.jobs.has_worker(
            job.class_key, datetime.now(UTC), measured_by=job.measured_by
        )
        return JobView.of_job(job, has_worker=has_worker)


@contextmanager
def _place_among(places: BoundedSemaphore, why_not: str) -> Iterator[None]:
    if not places.acquire(timeout=_LONGEST_WAIT_S):
        raise TooManyRequests(why_not, retry_after_s=_RETRY_AFTER_S, is_own_fault=False)
    try:
        yield
    finally:
        places.release()


def _has_ended_in_vain(job: Job, caller: Caller) -> bool:
    """Return whether a job was tried and is over, and so another is of no use to a caller.

    One that no worker began says nothing, and what another cancelled says nothing to this one.
    """
    if job.state is JobState.CANCELLED and job.owner != caller.owner:
        return False
    return job.state.is_over and job.attempts > 0
