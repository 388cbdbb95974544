"""Holding a job while it is run: its progress is told, and its cancellation heard of."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from threading import Event, Thread
from typing import Self

from gemm_tuner.domain.job import Job, JobProgress
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.store.jobs.jobs import Jobs

LEASE_S = 60.0
_EVERY_S = 1.0
_LAST_REPORT_S = 5.0  # as long as a database that answers may take for one


class HeldJob:
    """A job of a worker, renewed by a thread of its own while the context is open.

    The thread waits for the database alone, never for the sweep: what takes long to compile or to
    prove loses no job. The job is the worker's no more where it `is_lost`, and is to end with the
    best so far where it `is_cancelled`.
    """

    def __init__(
        self,
        job: Job,
        jobs: Jobs,
        *,
        worker: str,
        now: Callable[[], datetime],
        on_report: Callable[[], None],
    ) -> None:
        """Hold `job` for a worker; `on_report` is called in the thread after each report."""
        self.job = job
        # A worker before may have told more than this one knows at first.
        self._progress = replace(job.progress, seconds_left=job.budget_s)
        self._noted_at = now()
        self.is_cancelled = False
        self.is_lost = False
        self._jobs = jobs
        self._worker = worker
        self._now = now
        self._on_report = on_report
        self._is_over = Event()
        self._thread = Thread(target=self._keep, name="job", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join(_LAST_REPORT_S)

    def note(self, progress: JobProgress) -> None:
        """Keep how far the job is now, for the next report."""
        self._progress, self._noted_at = progress, self._now()

    def report(self) -> None:
        """Tell how far the job is, and hear whether it goes on."""
        job, now = self.job, self._now()
        if self._jobs.report(job.id, self._worker, self._progress_at(now), now, LEASE_S):
            return
        is_mine = self._jobs.is_held(job.id, self._worker)
        self.is_cancelled = is_mine
        self.is_lost = not is_mine

    def _progress_at(self, now: datetime) -> JobProgress:
        """Return what was noted last, with the time left since then."""
        noted, noted_at = self._progress, self._noted_at
        if noted.seconds_left is None:
            return noted
        left = noted.seconds_left - max(0.0, (now - noted_at).total_seconds())
        return replace(noted, seconds_left=max(0.0, left))

    def _keep(self) -> None:
        while not self._is_over.wait(_EVERY_S):
            try:
                self.report()
                self._on_report()
            except GemmTunerError:
                continue  # the database may answer the next time; if not, the sweep says so
