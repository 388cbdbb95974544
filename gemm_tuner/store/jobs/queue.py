"""The jobs as workers see them: taking one, telling how far it is, and ending it.

A worker holds a job for a time that it renews. Where it does not, because it was killed or cut off,
another takes the job, and goes on with the trials that are stored.
"""

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Select,
    case,
    exists,
    or_,
    select,
    true,
    update,
)

from gemm_tuner.domain.job import Job, JobProgress, JobState
from gemm_tuner.domain.printable import harmless
from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.jobs.rows import read_job, select_jobs, time_text
from gemm_tuner.store.jobs.workers import Workers, is_alive
from gemm_tuner.store.sql.statements import RowsDamaged, may_pass, translated_errors
from gemm_tuner.store.sql.tables import jobs, workers

MAX_ATTEMPTS = 3
UNTAKEN = timedelta(days=3)  # longer than a weekend, on which machines may be off
# A later end was written by a clock that was far ahead, and set back since: nobody renews it.
_LONGEST_LEASE = timedelta(minutes=15)
_MAX_DETAIL = 1_000

IS_WAITING = jobs.c.state == JobState.WAITING.value
IS_RUNNING = jobs.c.state == JobState.RUNNING.value
_CHANGED: dict[str, Any] = {"revision": jobs.c.revision + 1}
_LOST = "its worker was lost; see whether its machine ran out of memory"
_UNTAKEN = f"no worker that can run it came within {UNTAKEN.days} days; start one, then ask again"
_STOPPED = "its worker was stopped; another goes on"
_IS_UNTOUCHED = (jobs.c.attempts == 0) & (jobs.c.detail == "")  # what was given back says why
_CANCELLED = case(
    (_IS_UNTOUCHED, "cancelled before anything was tried"),
    else_="cancelled before the best was confirmed; what was tried is kept",
)


class JobQueue(Workers):
    """The jobs that wait or run. Times are those of the caller, and have a zone."""

    def next_threads(
        self,
        class_keys: Collection[str],
        now: datetime,
        but: Collection[str] = (),
        only: str | None = None,
    ) -> int | None:
        """Return how many threads the job needs that `claim` would take now; None if none waits.

        Nothing is changed.
        """
        which = _is_ready(now) & self._is_for_this_host()
        row = self._first(_first_of(class_keys, which, but, only))
        return None if row is None else row.threads

    def ready(
        self, class_key: str, now: datetime, *, limit: int, but: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Return the ids of the jobs that could be claimed now for a class, the first ones first.

        Those are left out for which there are only workers that measured already. Nothing is
        changed.
        """
        keys = {one.key for one in self.alive(now) if one.class_key == class_key and one.key}
        is_for_one = or_(jobs.c.measured_by.is_(None), *map(_is_for, sorted(keys)))
        query = _first_of([class_key], _is_ready(now) & is_for_one, but).limit(limit)
        with self._reading() as connection:
            return tuple(row.id for row in connection.execute(query))

    def names_for(self, job_id: str, now: datetime) -> frozenset[str]:
        """Return the names of the workers that may run a job which others measured already.

        It is empty where all may.
        """
        columns = select(jobs.c.class_key, jobs.c.measured_by)
        row = self._first(columns.where(jobs.c.id == job_id))
        if row is None or not row.measured_by:
            return frozenset()
        return frozenset(
            one.name
            for one in self.alive(now)
            if one.class_key == row.class_key and one.key and one.key not in row.measured_by
        )

    def _is_for_this_host(self) -> ColumnElement[bool]:
        """Return the condition that a job was not measured with the own key already."""
        return or_(jobs.c.measured_by.is_(None), _is_for(self._keys.own_made()))

    def claim(
        self,
        worker: str,
        *,
        class_keys: Collection[str],
        now: datetime,
        lease_s: float,
        but: Collection[str] = (),
        only: str | None = None,
    ) -> Job | None:
        """Give a worker the job of the highest priority, the oldest of these; None if none waits.

        `but` are the ids of jobs that it does not want now, and `only` that of the one it wants. It
        may be one whose worker was lost. One that this host measured already is for others. A job
        that lost `MAX_ATTEMPTS` workers has failed, and so
        has one whose row was damaged.
        """
        query = _first_of(class_keys, IS_WAITING & self._is_for_this_host(), but, only)
        begun = {
            "state": JobState.RUNNING.value,
            "worker": worker,
            "leased_until": _lease(now, lease_s),
            "attempts": jobs.c.attempts + 1,
            "detail": "",
        }
        with self._writing() as connection:
            take_back_abandoned(connection, now)
            while (found := connection.execute(query).first()) is not None:
                change(connection, jobs.c.id == found.id, now, begun)
                job = read_or_end(connection, found.id, now)
                if job is not None:
                    return job
            return None

    def report(
        self, job_id: str, worker: str, progress: JobProgress, now: datetime, lease_s: float
    ) -> bool:
        """Keep how far a worker is, and let it hold its job for longer.

        Return False if the worker is to end the job: it was asked to be cancelled, or is not this
        worker's any more.
        """
        told = {
            "tried": progress.tried,
            "failed": progress.failed,
            "best_ns": progress.best_ns,
            "over_baseline": progress.over_baseline,
            "seconds_left": progress.seconds_left,
            "leased_until": _lease(now, lease_s),
        }
        with self._writing() as connection:
            goes_on = _is_held(job_id, worker) & ~jobs.c.is_cancel_asked
            change(connection, _is_held(job_id, worker), now, told)
            return connection.execute(select(jobs.c.id).where(goes_on)).first() is not None

    def is_held(self, job_id: str, worker: str) -> bool:
        """Return whether a worker holds a job, whatever else its row says."""
        return self._first(select(jobs.c.id).where(_is_held(job_id, worker))) is not None

    def finish(
        self, job_id: str, worker: str, state: JobState, detail: str, now: datetime
    ) -> Job | None:
        """End a job that a worker holds, and return it; None if it is not this worker's."""
        return self._let_go(job_id, worker, _ended(state, detail), now)

    def release(
        self, job_id: str, worker: str, now: datetime, *, why: str = _STOPPED
    ) -> Job | None:
        """Let a job wait again whose worker was stopped or cut off, as if that had not begun it.

        Return the job, None if it is not this worker's. One whose cancellation was asked is over.
        """
        waiting = {**_again_or_over(why), "attempts": jobs.c.attempts - 1}
        return self._let_go(job_id, worker, waiting, now)

    def put_back(self, job_id: str, worker: str, why: str, now: datetime) -> Job | None:
        """Let a job wait again that did not come to its end; after `MAX_ATTEMPTS` it has failed.

        Return the job, None if it is not this worker's. One whose cancellation was asked is over.
        """
        return self._let_go(job_id, worker, _again_or_over(why, has_limit=True), now)

    def end_untaken(self, now: datetime) -> None:
        """End the jobs that waited for too long for a worker that can run them."""
        with self._writing() as connection:
            end_untaken(connection, now)

    def _let_go(
        self, job_id: str, worker: str, changes: Mapping[str, Any], now: datetime
    ) -> Job | None:
        with self._writing() as connection:
            is_held = change(connection, _is_held(job_id, worker), now, changes)
            return read_or_end(connection, job_id, now) if is_held else None


def read_or_end(connection: Connection, job_id: str, now: datetime) -> Job | None:
    """Return a job, None if there is none, or its row was damaged.

    A damaged one has failed then: else it would stand in the way of others for ever.
    """
    try:
        with translated_errors():
            row = connection.execute(select_jobs().where(jobs.c.id == job_id)).first()
            return None if row is None else read_job(row)
    except StoreFailed as error:
        if may_pass(error) and not isinstance(error, RowsDamaged):
            raise
        is_it = (jobs.c.id == job_id) & (IS_WAITING | IS_RUNNING)
        change(connection, is_it, now, _ended(JobState.FAILED, str(error)))
        return None


def change(
    connection: Connection, which: ColumnElement[bool], now: datetime, changes: Mapping[str, Any]
) -> bool:
    """Change the job that a condition finds, and return whether it finds one."""
    values = {**_CHANGED, "changed_at": time_text(now), **changes}
    return connection.execute(update(jobs).where(which).values(values)).rowcount > 0


def take_back_abandoned(connection: Connection, now: datetime) -> None:
    """Let jobs wait again whose workers were not heard of in time, or end them."""
    lost = _again_or_over(_LOST, has_limit=True)
    values = {**_CHANGED, "changed_at": time_text(now), **lost}
    connection.execute(update(jobs).where(_is_abandoned(now)).values(values))


def end_untaken(connection: Connection, now: datetime) -> None:
    """End the jobs that waited for `UNTAKEN` while no worker ran any of their class.

    So does one that is still running and did not change, since its worker was lost. Those of a long
    queue wait for longer. One for other hosts does not: these may never come, however much those
    run that measured already. No job ends while a worker for it is alive.
    """
    one = jobs.alias()
    is_run = select(one.c.class_key).where(one.c.worker.is_not(None), _is_recent(one, now))
    may_run = or_(jobs.c.measured_by.is_(None), ~jobs.c.measured_by.contains(workers.c.key))
    has_worker = exists().where(workers.c.class_key == jobs.c.class_key, is_alive(now), may_run)
    is_idle = or_(jobs.c.measured_by.is_not(None), jobs.c.class_key.not_in(is_run))
    is_untaken = (IS_WAITING | IS_RUNNING) & ~_is_recent(jobs, now) & is_idle & ~has_worker
    values = {**_CHANGED, "changed_at": time_text(now), **_ended(JobState.FAILED, _UNTAKEN)}
    connection.execute(update(jobs).where(is_untaken).values(values))


def _is_recent(table: FromClause, now: datetime) -> ColumnElement[bool]:
    """Return whether a job changed not long ago; what a clock wrote that was ahead says nothing."""
    return table.c.changed_at.between(time_text(now - UNTAKEN), time_text(now + UNTAKEN))


def cancelled() -> dict[str, Any]:
    """Return what changes in a job that is cancelled while it waits."""
    return {**_ended(JobState.CANCELLED, ""), "detail": _CANCELLED}


def _ended(state: JobState, detail: str) -> dict[str, Any]:
    """Return what changes in a job that is over."""
    return {
        "state": state.value,
        "detail": _kept(detail),
        "seconds_left": 0.0,
        "leased_until": None,
    }


def _again_or_over(why: str, *, has_limit: bool = False) -> dict[str, Any]:
    """Return what changes in a running job that nobody runs any more.

    One that was to be cancelled is over, and so is, where attempts are limited, one without more.
    """
    cases: list[tuple[ColumnElement[bool], str]] = [
        (jobs.c.is_cancel_asked, JobState.CANCELLED.value)
    ]
    if has_limit:
        cases.append((jobs.c.attempts >= MAX_ATTEMPTS, JobState.FAILED.value))
    return {
        "worker": None,
        "leased_until": None,
        "seconds_left": None,
        "state": case(*cases, else_=JobState.WAITING.value),
        "detail": case((jobs.c.is_cancel_asked, _CANCELLED), else_=_kept(why)),
    }


def _kept(text: str) -> str:
    """Return what is kept of a text that may quote anything, in characters databases take."""
    return harmless(text).encode(errors="backslashreplace").decode()[:_MAX_DETAIL]


def _first_of(
    class_keys: Collection[str],
    which: ColumnElement[bool],
    but: Collection[str],
    only: str | None = None,
) -> Select[Any]:
    """Return the query for the job of the highest priority, the oldest of these."""
    wanted = true() if only is None else jobs.c.id == only
    return (
        select(jobs.c.id, jobs.c.threads)
        .where(which, wanted)
        .where(jobs.c.class_key.in_(sorted(class_keys)), jobs.c.id.not_in(sorted(but)))
        .order_by(jobs.c.priority.desc(), jobs.c.sequence)
        .limit(1)
    )


def _is_for(key: str) -> ColumnElement[bool]:
    return jobs.c.measured_by.not_like(f"%{key}%")


def _is_held(job_id: str, worker: str) -> ColumnElement[bool]:
    return (jobs.c.id == job_id) & IS_RUNNING & (jobs.c.worker == worker)


def _is_ready(now: datetime) -> ColumnElement[bool]:
    return IS_WAITING | (_is_abandoned(now) & ~jobs.c.is_cancel_asked)


def _is_abandoned(now: datetime) -> ColumnElement[bool]:
    is_late = jobs.c.leased_until < time_text(now)
    return IS_RUNNING & (is_late | (jobs.c.leased_until > time_text(now + _LONGEST_LEASE)))


def _lease(now: datetime, lease_s: float) -> str:
    return time_text(now + timedelta(seconds=lease_s))
