"""A worker that belongs to a fleet: a scheduler says which job it runs next.

Dask lives in a thread of its own, and the jobs are run by the main thread, as those of every worker
are. While the scheduler is away, a job goes on, and the worker joins again when it has ended.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, Self

from platformdirs import user_cache_path

from gemm_tuner.fleet.engine import resources_of
from gemm_tuner.fleet.library import greet, load_distributed, security_of
from gemm_tuner.fleet.scheduler import Scheduler
from gemm_tuner.fleet.task import EXTENSION, Inbox
from gemm_tuner.tuning.worker import Worker

_LISTEN_S = 0.5
_JOIN_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 10.0
_LEAVE_TIMEOUT_S = 5.0


@dataclass(slots=True, kw_only=True)
class FleetWorker:
    """Runs the jobs that a scheduler places on this machine, until its worker is stopped."""

    worker: Worker
    scheduler: Scheduler
    inbox: Inbox = field(default_factory=Inbox)

    def work(self) -> None:
        """Run jobs until the worker is stopped; then its job, if it has one, waits for another.

        Raises:
            MissingCapability: Dask is not installed.
            InvalidSetting: the files of TLS cannot be used.
        """
        security_of(self.scheduler)
        try:
            with Membership(self.worker, self.scheduler, self.inbox) as membership:
                while not self.worker.is_stopped():
                    self._work_once(membership)
        finally:
            self.worker.leave()

    def _work_once(self, membership: "Membership") -> None:
        if membership.is_joined:
            self.worker.show()
        asked = self.inbox.get(_LISTEN_S)
        if asked is None:
            membership.is_free.set()
            return
        job_id, future = asked
        membership.is_free.clear()
        try:
            self.worker.run_one(job_id)
        finally:
            future.set_result(None)  # what came out is in the row of the job


class Membership:
    """Keeps a worker in the list of a scheduler while the context is open.

    It joins again after the connection was lost, once the worker `is_free`.
    """

    def __init__(self, worker: Worker, scheduler: Scheduler, inbox: Inbox) -> None:
        self.is_joined = False
        self.is_free = Event()
        self._worker = worker
        self._scheduler = scheduler
        self._inbox = inbox
        self._is_over = Event()
        self._thread = Thread(target=self._keep, name="fleet", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self.is_free.set()
        self._thread.join(3 * _LEAVE_TIMEOUT_S)

    def _keep(self) -> None:
        pause_s, is_told = _FIRST_PAUSE_S, False
        while not self._is_over.is_set():
            why = asyncio.run(self._belong())
            self.is_joined, was_joined = False, self.is_joined
            if self._is_over.is_set():
                return
            pause_s = _FIRST_PAUSE_S if was_joined else min(2 * pause_s, _LONGEST_PAUSE_S)
            if was_joined or not is_told:
                self._worker.tell(f"Waiting until it can go on: {why}")
            is_told = True
            self._is_over.wait(pause_s)
            self.is_free.wait()

    async def _belong(self) -> str:
        """Belong to the fleet until that ends, and say why it did."""
        try:
            await greet(self._scheduler)  # with whose refusal the library tries again in silence
            member = self._new_member()
            try:
                await member
                self.is_joined = True
                self._worker.tell(f"It belongs to the fleet of {self._scheduler.address}.")
                await self._until_lost(member)
            finally:
                with suppress(Exception, asyncio.CancelledError):
                    leaving = member.close(timeout=_LEAVE_TIMEOUT_S, executor_wait=False)
                    await asyncio.wait_for(leaving, 2 * _LEAVE_TIMEOUT_S)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it tries again
            return str(error) or type(error).__name__
        return f"the connection to the scheduler {self._scheduler.address} was lost."

    def _new_member(self) -> Any:  # noqa: ANN401 - a type of the library
        return load_distributed().Worker(
            self._scheduler.address,
            nthreads=1,
            name=self._worker.name,
            resources=resources_of(self._worker.cpu.class_key),
            security=security_of(self._scheduler),
            extensions={EXTENSION: lambda _member: self._inbox},
            host="127.0.0.1" if self._scheduler.is_local else None,
            dashboard_address="127.0.0.1:0",  # it has no pages, but would listen everywhere
            # It keeps next to nothing there, and removes what a killed one has left.
            local_directory=str(user_cache_path("gemm-tuner") / "fleet"),
            memory_limit=0,
            death_timeout=_JOIN_TIMEOUT_S,
        )

    async def _until_lost(self, member: Any) -> None:  # noqa: ANN401 - a type of the library
        """Return when the scheduler is gone, or this worker leaves."""
        lost = asyncio.ensure_future(member.finished())
        while not (lost.done() or self._is_over.is_set()):
            await asyncio.wait({lost}, timeout=_LISTEN_S)
        lost.cancel()
