"""Telling those who wait for jobs of their changes: one query for all of them at a time."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from anyio import to_thread
from fastapi import Request

from gemm_tuner.domain.job import Job
from gemm_tuner.errors import GemmTunerError, StoreFailed
from gemm_tuner_service.middleware.lasting import let_last

POLL_S = 0.5

_LOGGER = logging.getLogger(__name__)


class Followed:
    """A job that somebody waits for, as it was read last; `fault` is why it cannot be any more."""

    def __init__(self, job: Job, wake: Callable[[], None]) -> None:
        self.job = job
        self.is_gone = False
        self.fault: StoreFailed | None = None
        self._wake = wake

    @property
    def is_over(self) -> bool:
        """Return whether it will not change any more."""
        return self.is_gone or self.fault is not None or self.job.state.is_over

    def tell(self, job: Job | StoreFailed | None) -> None:
        """Take what was read, and wake who waits if that is new."""
        if job is None:
            self.is_gone = True
        elif isinstance(job, StoreFailed):
            self.fault = job
        elif job.revision > self.job.revision:
            self.job = job
        else:
            return
        self._wake()


class JobWatch:
    """Reads the jobs that somebody waits for, every `POLL_S` and only while somebody does.

    All its methods are called in one event loop; `read` is called in a thread.
    """

    def __init__(self, read: Callable[[Collection[str]], Mapping[str, Job | StoreFailed]]) -> None:
        self._read = read
        self._followed: dict[str, list[Followed]] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def follow(self, job: Job, wake: Callable[[], None]) -> Iterator[Followed]:
        """Yield a job that is kept up to date; `wake` is called when it changes."""
        followed = Followed(job, wake)
        self._followed.setdefault(job.id, []).append(followed)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            yield followed
        finally:
            others = self._followed[job.id]
            others.remove(followed)
            if not others:
                del self._followed[job.id]

    async def wait_for_end(self, request: Request, job: Job, seconds: float) -> Job:
        """Return a job as it is at its end, or when so much time has passed.

        Raises:
            TooManyRequests: too many wait.
            StoreFailed: its row was damaged meanwhile.
        """
        lasting = let_last(request.scope, seconds)
        with self.follow(job, lasting.wake) as followed:
            while not followed.is_over and lasting.rest_s > 0:
                await lasting.pause(seconds)
            if followed.fault is not None:
                raise followed.fault
            return followed.job

    async def _poll(self) -> None:
        is_failing = False
        while self._followed:
            await asyncio.sleep(POLL_S)
            ids = tuple(self._followed)
            try:
                found = await to_thread.run_sync(self._read, ids)
            except GemmTunerError as error:  # who waits goes on: the database may come back
                if not is_failing:
                    _LOGGER.warning("jobs cannot be read: %s", error)
                is_failing = True
                continue
            is_failing = False
            for job_id in ids:
                self._tell(job_id, found.get(job_id))

    def _tell(self, job_id: str, found: Job | StoreFailed | None) -> None:
        followers = self._followed.get(job_id, ())
        if isinstance(found, StoreFailed) and not any(one.fault for one in followers):
            _LOGGER.error("job %s is followed no more: %s", job_id, found)
        for followed in followers:
            followed.tell(found)
