"""A worker: takes jobs from the database, one after the other, and tunes their problems here.

It measures while no other worker of this user does on this machine, and begins while there are as
many idle cores as a job needs. What is disturbed all the same decides nothing, and is tried again.
"""

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.domain.spans import is_within
from gemm_tuner.errors import GemmTunerError, StoreFailed
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.machine.measuring_lock import MeasuringLock, as_holder
from gemm_tuner.machine.processors import USUAL_LOAD_CORES
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.statements import may_pass
from gemm_tuner.tuning.job import Ending, JobRun
from gemm_tuner.tuning.patience import idle_cores
from gemm_tuner.tuning.ranges.holding import LEASE_S, HeldJob

KEPT = timedelta(days=30)  # jobs that are over
_POLL_S = 0.5
_SEEN_EVERY = timedelta(seconds=15)
_FORGET_EVERY = timedelta(hours=1)
# A job is begun on a busy machine at last: it may come out, and nobody waits for ever.
_BUSY_AT_MOST = timedelta(minutes=10)
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_MOST_TRIES = 120  # of a job that the store cuts off: an hour

_LONG_AGO = datetime.min.replace(tzinfo=UTC)
_Answer = TypeVar("_Answer")


def new_worker_name() -> str:
    """Return a name that no other worker has: the machine, the process and a random part."""
    return f"{os.uname().nodename[:80]}-{os.getpid()}-{secrets.token_hex(4)}"


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class _CutOff:
    """How often in a row the store cut a job off here, and for how long other jobs come first."""

    tries: int
    since: datetime
    pause: timedelta


_FIRST_TIME = _CutOff(0, _LONG_AGO, timedelta(0))


@dataclass(slots=True, kw_only=True)
class Worker:
    """Runs jobs for CPUs like this one until it `is_stopped`; `tell` takes a line for people.

    While the database does not answer, it waits and says so once. `idle_cores` may not know.
    """

    jobs: Jobs
    repository: Repository
    cpu: Cpu
    toolchain: Toolchain
    tell: Callable[[str], None]
    is_stopped: Callable[[], bool]
    name: str = field(default_factory=new_worker_name)
    lock: MeasuringLock = field(default_factory=MeasuringLock)
    idle_cores: Callable[[], float | None] = field(default_factory=lambda: idle_cores)
    now: Callable[[], datetime] = field(default_factory=lambda: _now)
    sleep: Callable[[float], None] = field(default_factory=lambda: time.sleep)
    _seen_at: datetime = field(default=_LONG_AGO, init=False)
    _forgot_at: datetime = field(default=_LONG_AGO, init=False)
    _busy_since: datetime | None = field(default=None, init=False)
    _is_cut_off: bool = field(default=False, init=False)
    _cut_off: dict[str, _CutOff] = field(default_factory=dict, init=False)  # by the id of a job

    def work(self) -> None:
        """Run jobs until the worker is stopped; then its job, if it has one, waits for another."""
        try:
            while not self.is_stopped():
                self._work_once()
        finally:
            self.leave()

    def run_one(self, job_id: str) -> None:
        """Run a job as soon as it can be begun here, unless another does or it is over."""
        while not self.is_stopped() and self._insist(lambda: self._is_ready(job_id)):
            if self._work_once(job_id):
                return

    def show(self) -> None:
        """Let the database know that this worker lives, if that is due and it answers."""
        with suppress(StoreFailed):
            self._show(self.now())

    def leave(self) -> None:
        """Let another process measure, and the database know that this worker ended."""
        self.lock.release()
        with suppress(StoreFailed):
            self.jobs.forget_worker(self.name)

    def _work_once(self, only: str | None = None) -> bool:
        """Run a job if there is one that can be begun now, or wait for a moment."""
        try:
            job = self._insist(lambda: self._take(only))
            if job is None:
                self._pause(_POLL_S)
                return False
            with as_holder():
                self._run(job)
            return True
        finally:
            self.lock.release()

    def _take(self, only: str | None) -> Job | None:
        """Claim the next job, None if there is none or this is no moment to measure."""
        now = self.now()
        self._show(now)
        class_keys, cut_off = self._wanted(now)
        threads = self.jobs.next_threads(class_keys, now, cut_off, only)
        if threads is None:
            self._busy_since = None
        elif self.lock.acquire() and self._is_calm(threads):
            return self.jobs.claim(
                self.name, class_keys=class_keys, now=now, lease_s=LEASE_S, but=cut_off, only=only
            )
        return None

    def _is_ready(self, job_id: str) -> bool:
        now = self.now()
        class_keys, cut_off = self._wanted(now)
        return self.jobs.next_threads(class_keys, now, cut_off, job_id) is not None

    def _wanted(self, now: datetime) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the classes of the jobs that this worker runs, and the ids of those it lets be."""
        cut_off = tuple(
            key for key, one in self._cut_off.items() if is_within(now, one.since, one.pause)
        )
        return (self.cpu.class_key,), cut_off

    def _show(self, now: datetime, job: Job | None = None) -> None:
        """Let the database know that this worker lives, and from time to time end old jobs."""
        if not is_within(now, self._seen_at, _SEEN_EVERY):
            self.jobs.see_worker(
                self.name,
                class_key=self.cpu.class_key,
                cpu_key=self.cpu.exact_key,
                now=now,
                job_id=job.id if job else None,
            )
            self._seen_at = now
        if job is None and not is_within(now, self._forgot_at, _FORGET_EVERY):
            self.jobs.end_untaken(now)
            self.jobs.forget_over(now - KEPT)
            self._forgot_at = now

    def _is_calm(self, threads: int) -> bool:
        """Return whether there are idle cores for so many threads, or were not for too long."""
        idle = self.idle_cores()
        needed = min(threads, usable_cpus()) - USUAL_LOAD_CORES
        if idle is None or idle >= needed:
            self._busy_since = None
            return True
        if self._busy_since is None:
            self._busy_since = self.now()
            self.tell(f"A job waits for idle cores: {idle:.1f} are idle, and it needs {threads}.")
        if is_within(self.now(), self._busy_since, _BUSY_AT_MOST):
            return False
        self._busy_since = None
        return True

    def _run(self, job: Job) -> None:
        regime, called = job.context.regime.value, job.id[:8]
        asked = f"{job.problem.text}, threads {job.context.threads}, {regime}"
        if job.id not in self._cut_off:
            self.tell(f"Job {called}: {asked}; at most {job.budget_s:g} s of search.")
        held = HeldJob(
            job,
            self.jobs,
            worker=self.name,
            now=self.now,
            on_report=lambda: self._show(self.now(), job),
        )
        try:
            with held:
                ending = self._ending_of(held)
        except KeyboardInterrupt:
            with suppress(StoreFailed):
                self.jobs.release(job.id, self.name, self.now())
            raise
        if ending is not None and not ending.counts:
            ending = self._note_cut_off(job, ending)
        else:
            self._cut_off.pop(job.id, None)
        ended = self._insist(lambda: self._end(held, ending))
        if self._cut_off.get(job.id, _FIRST_TIME).tries > 1:
            return  # it was said already
        if ended is None:
            self.tell(f"Job {called} is not run by this worker any more.")
        else:
            self.tell(f"Job {called} {ended.state.value}: {ended.detail}")
            if ended.state is JobState.DONE:
                self._insist(lambda: self.jobs.ask_other_hosts(ended, self.now()))

    def _note_cut_off(self, job: Job, ending: Ending) -> Ending:
        """Note that the store cut a job off, and return how it ends: it waits, but not for ever."""
        tries = self._cut_off.get(job.id, _FIRST_TIME).tries + 1
        if tries > _MOST_TRIES:
            del self._cut_off[job.id]
            return replace(ending, state=JobState.FAILED, counts=True)
        pause_s = min(_FIRST_PAUSE_S * 2 ** (tries - 1), _LONGEST_PAUSE_S)
        self._cut_off[job.id] = _CutOff(tries, self.now(), timedelta(seconds=pause_s))
        return ending

    def _ending_of(self, held: HeldJob) -> Ending | None:
        """Return how a job ends that is run now, None if it was stopped or lost before."""
        run = JobRun(
            held=held,
            cpu=self.cpu,
            repository=self.repository,
            toolchain=self.toolchain,
            is_stopped=self.is_stopped,
        )
        try:
            return run.run()
        except StoreFailed as error:
            return Ending(state=JobState.WAITING, detail=str(error), counts=not may_pass(error))
        except GemmTunerError as error:
            return Ending(state=JobState.FAILED, detail=str(error))
        except Exception as error:  # noqa: BLE001 - the last resort: other jobs go on
            why = f"unexpected {type(error).__name__}: {error}; please report this"
            return Ending(state=JobState.FAILED, detail=why)

    def _end(self, held: HeldJob, ending: Ending | None) -> Job | None:
        """Write how a job ended; return it, None if it is not this worker's any more."""
        key, now = held.job.id, self.now()
        if ending is None:
            return self.jobs.release(key, self.name, now)
        if not ending.counts:
            return self.jobs.release(key, self.name, now, why=ending.detail)
        if ending.state is JobState.WAITING:
            return self.jobs.put_back(key, self.name, ending.detail, now)
        held.report()
        return self.jobs.finish(key, self.name, ending.state, ending.detail, now)

    def _insist(self, action: Callable[[], _Answer | None]) -> _Answer | None:
        """Return what the database answers, however long it does not; None once stopped."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                answer = action()
            except StoreFailed as error:
                if not self._is_cut_off:
                    self.tell(f"Waiting until it can go on: {error}")
                self._is_cut_off = True
                if self.is_stopped():
                    return None
                self._pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                if self._is_cut_off:
                    self.tell("It goes on.")
                self._is_cut_off = False
                return answer

    def _pause(self, seconds: float) -> None:
        """Wait, and notice at once when the worker is stopped."""
        left = seconds
        while left > 0 and not self.is_stopped():
            self.sleep(min(left, _POLL_S))
            left -= _POLL_S
