"""The one task of a fleet: run the job of this id now.

What Dask carries is a function and a text. The function hands the text, if it is an id, to the
worker of its process, and waits for its end; nothing else of a task is used. This module is loaded
by schedulers too, so it loads little.
"""

import asyncio
import re
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from gemm_tuner.errors import InvalidSetting

EXTENSION = "gemm_tuner"
_ID = re.compile("[0-9a-f]{32}")


class Inbox:
    """The jobs that a worker is asked to run, from the thread of Dask to that which measures."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[str, Future[None]]] = SimpleQueue()

    def put(self, job_id: str) -> "Future[None]":
        """Ask for a job to be run, and return what is done when it was, or need not be any more.

        Raises:
            InvalidSetting: this is no id of a job.
        """
        if not _ID.fullmatch(job_id):
            raise InvalidSetting(f"{job_id[:80]!r} is no id of a job; it has 32 hex digits.")
        future: Future[None] = Future()
        self._asked.put((job_id, future))
        return future

    def get(self, timeout_s: float) -> "tuple[str, Future[None]] | None":
        """Return the next job that is asked for; None if there is none for so long.

        Its future is running then. One whose asker gave it up is left out.
        """
        try:
            job_id, future = self._asked.get(timeout=timeout_s)
        except Empty:
            return None
        return (job_id, future) if future.set_running_or_notify_cancel() else None


async def run_job(job_id: str) -> None:
    """Let the worker of this process run a job, and return when it did, or need not any more."""
    from distributed import get_worker  # noqa: PLC0415 - optional, and slow to load

    worker: Any = get_worker()
    inbox: Inbox = worker.extensions[EXTENSION]
    await asyncio.wrap_future(inbox.put(str(job_id)))
