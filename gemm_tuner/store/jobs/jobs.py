"""Reading and writing jobs as those see them who ask: for one, how far it is, and for its end.

The database holds the truth: jobs outlive the service and its workers.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select

from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import GemmTunerError, InvalidSetting
from gemm_tuner.store.jobs.queue import (
    IS_RUNNING,
    IS_WAITING,
    JobQueue,
    cancelled,
    change,
    end_untaken,
    read_or_end,
    take_back_abandoned,
)
from gemm_tuner.store.jobs.rows import question_columns, read_job, select_jobs, time_text
from gemm_tuner.store.jobs.views import JobViews
from gemm_tuner.store.sql.statements import translated_errors
from gemm_tuner.store.sql.tables import job_keys, jobs
from gemm_tuner.store.verdicts.withheld import WithheldKernels

MAX_IN_FLIGHT = 10_000
MAX_IN_FLIGHT_OF_OWNER = 1_000
MAX_KEYS_OF_OWNER = 10_000
MAX_KEPT = 100_000  # jobs behind the newest; those in flight do not count
_MAX_KEY = 255
_MAX_OWNER = 64
_IS_IN_FLIGHT = IS_WAITING | IS_RUNNING


class JobsFull(GemmTunerError):
    """So many jobs wait, of everybody or of one owner, that no more are taken."""


class Jobs(JobQueue, JobViews, WithheldKernels):
    """The jobs of one database. Times are those of the caller, and have a zone."""

    def submit(
        self,
        problem: Problem,
        *,
        class_key: str,
        context: ExecutionContext,
        budget_s: float,
        priority: int,
        owner: str,
        idempotency_key: str | None,
        now: datetime,
        measured_by: frozenset[str] = frozenset(),
        is_enough: Callable[[Job], bool] | None = None,
    ) -> tuple[Job, bool]:
        """Return the job for a question, and whether it was made for it.

        While one for the same problem, class, threads and regime waits or runs, it is that one,
        with the higher priority of both. An owner who repeats a key gets the job of that key, even
        if it is over. Where hosts measured already and a quorum holds the kernel back, it is a job
        for others, if it needs more of them or there are any; `measured_by` names further ones. One
        that waits for others is for all hosts again once that is asked for. Where `is_enough` says
        so of the last job that there was for the question, it is that one, though it may be over.

        Raises:
            InvalidProblem: the problem multiplies nothing.
            InvalidSetting: budget, priority, owner or key cannot be used, or the key was used for
                another question.
            JobsFull: too many jobs are in flight, or this owner has too many of them or of keys.
        """
        problem.check_work(context.regime)
        _check_names(owner, idempotency_key)
        columns = question_columns(problem, class_key, context)
        asked = Job(
            id=secrets.token_hex(16),
            problem=problem,
            class_key=class_key,
            context=context,
            budget_s=float(budget_s),
            priority=priority,
            state=JobState.WAITING,
            owner=owner,
            created_at=now,
            changed_at=now,
            measured_by=self._measured_by(problem, class_key, context, now, measured_by),
        )
        question = identity([*columns.values(), asked.budget_s, priority])
        same = _IS_IN_FLIGHT & ~jobs.c.is_cancel_asked & _all_equal(columns)
        with self._writing() as connection:
            if idempotency_key is not None:
                known = _job_of_key(connection, owner, idempotency_key, question, now)
                if known is not None:
                    return known, False
            row = connection.execute(select(jobs.c.id).where(same)).first()
            job = None if row is None else read_or_end(connection, row.id, now)
            is_new = job is None
            if job is None:
                last = _last_of(connection, columns, now) if is_enough else None
                if is_enough and last and is_enough(last):
                    return last, False
                end_untaken(connection, now)
                _check_room(connection, owner)
                _insert_job(connection, asked, columns)
                job = read_or_end(connection, asked.id, now) or asked
            elif joined := _changes_by_joining(job, asked):
                change(connection, jobs.c.id == job.id, now, joined)
                job = read_or_end(connection, job.id, now) or job
            if idempotency_key is not None:
                _insert_key(connection, owner, idempotency_key, question, job.id)
            return job, is_new

    def ask_other_hosts(self, job: Job, now: datetime) -> Job | None:
        """Ask as `job` did for what other hosts are to find too, if this one measured it.

        Return that job, None if there is none to be asked, or no room for another.
        """
        # Those of `job` too: hosts that do not believe each other would ask in turn for ever.
        keys = self._measured_by(job.problem, job.class_key, job.context, now, job.measured_by)
        if self._keys.own_made() not in keys:
            return None
        with suppress(JobsFull):  # it is asked for again by who needs it
            asked, _is_new = self.submit(
                job.problem,
                class_key=job.class_key,
                context=job.context,
                budget_s=job.budget_s,
                priority=job.priority,
                owner=job.owner,
                idempotency_key=None,
                now=now,
                measured_by=keys,
            )
            return asked
        return None

    def _measured_by(
        self,
        problem: Problem,
        class_key: str,
        context: ExecutionContext,
        now: datetime,
        before: frozenset[str],
    ) -> frozenset[str]:
        """Return the keys of the hosts that need not run a job for a question, as `before` ones."""
        found = self.withheld(problem, class_key=class_key, context=context)
        if not found.hosts:
            return frozenset()
        keys = found.keys | before
        lacks_hosts = len(keys) < found.quorum
        has_others = lacks_hosts or self.has_worker(class_key, now, measured_by=keys)
        return keys if has_others else frozenset()

    def get(self, job_id: str) -> Job | None:
        """Return a job, None if there is none of this id."""
        row = self._first(select_jobs().where(jobs.c.id == job_id))
        with translated_errors():
            return None if row is None else read_job(row)

    def starting_with(self, digits: str) -> tuple[Job, ...]:
        """Return the jobs whose ids begin with these hex digits, at most two."""
        query = select_jobs().where(jobs.c.id.startswith(digits, autoescape=True)).limit(2)
        with self._reading() as connection:
            return tuple(read_job(row) for row in connection.execute(query))

    def cancel(self, job_id: str, now: datetime) -> Job | None:
        """Cancel a job and return it, None if none of this id can be read; one that is over stays.

        One that waits is over at once. A running one is ended by its worker, with the best so far.
        """
        is_it = jobs.c.id == job_id
        with self._writing() as connection:
            take_back_abandoned(connection, now)
            change(connection, is_it & IS_WAITING, now, cancelled())
            asked = IS_RUNNING & ~jobs.c.is_cancel_asked
            change(connection, is_it & asked, now, {"is_cancel_asked": True})
            return read_or_end(connection, job_id, now)

    def forget_over(self, before: datetime) -> int:
        """Delete the jobs that were over before a time; return how many."""
        with self._writing() as connection:
            return _delete_over(connection, jobs.c.changed_at < time_text(before))


def _check_names(owner: str, key: str | None) -> None:
    if not 0 < len(owner) <= _MAX_OWNER:
        raise InvalidSetting(
            f"owner {owner[:80]!r} cannot be used; give 1 to {_MAX_OWNER} letters."
        )
    if key is not None and not (0 < len(key) <= _MAX_KEY and key.isascii() and key.isprintable()):
        raise InvalidSetting(
            f"idempotency key {key[:80]!r} cannot be used; "
            f"give 1 to {_MAX_KEY} printable letters of ASCII."
        )


def _check_room(connection: Connection, owner: str) -> None:
    count = select(func.count()).where(_IS_IN_FLIGHT)
    in_flight = connection.scalar(count) or 0
    of_owner = connection.scalar(count.where(jobs.c.owner == owner)) or 0
    if in_flight >= MAX_IN_FLIGHT:
        raise JobsFull(
            f"{in_flight} jobs wait or run already, and no more are taken; ask again later, or "
            "let more workers run."
        )
    if of_owner >= MAX_IN_FLIGHT_OF_OWNER:
        raise JobsFull(
            f"{of_owner} jobs of {owner} wait or run already, and no more are taken; ask again "
            "when some are over, or cancel some."
        )


def _insert_job(connection: Connection, job: Job, question: dict[str, str | int]) -> None:
    """Insert a job that waits, and delete those that are over and far behind it."""
    connection.execute(
        insert(jobs).values(
            id=job.id,
            problem=job.problem.text,
            **question,
            budget_s=job.budget_s,
            priority=job.priority,
            state=job.state.value,
            owner=job.owner,
            created_at=time_text(job.created_at),
            changed_at=time_text(job.changed_at),
            attempts=0,
            tried=0,
            failed=0,
            revision=job.revision,
            is_cancel_asked=False,
            detail="",
            measured_by=_keys_text(job.measured_by),
        )
    )
    newest = connection.scalar(select(func.max(jobs.c.sequence))) or 0
    _delete_over(connection, jobs.c.sequence <= newest - MAX_KEPT)


def _changes_by_joining(job: Job, asked: Job) -> dict[str, Any]:
    """Return what changes in a job that is asked for once more.

    It gets the higher priority, and is for each host that either of both who ask wants it from.
    """
    changes: dict[str, Any] = {}
    if job.priority < asked.priority:
        changes["priority"] = asked.priority
    if not job.measured_by <= asked.measured_by:
        changes["measured_by"] = _keys_text(job.measured_by & asked.measured_by)
    return changes


def _keys_text(keys: frozenset[str]) -> str | None:
    return " ".join(sorted(keys)) or None


def _insert_key(connection: Connection, owner: str, key: str, question: str, job_id: str) -> None:
    count = select(func.count()).where(job_keys.c.owner == owner)
    if (connection.scalar(count) or 0) >= MAX_KEYS_OF_OWNER:
        raise JobsFull(
            f"{owner} used {MAX_KEYS_OF_OWNER} idempotency keys for jobs that are kept; "
            "ask without a key, or when older jobs are forgotten."
        )
    connection.execute(
        insert(job_keys).values(owner=owner, idempotency_key=key, question=question, job_id=job_id)
    )


def _job_of_key(
    connection: Connection, owner: str, key: str, question: str, now: datetime
) -> Job | None:
    """Return the job that an owner asked for by a key, None if the key is new."""
    used = select(job_keys.c.job_id, job_keys.c.question).where(
        job_keys.c.owner == owner, job_keys.c.idempotency_key == key
    )
    known = connection.execute(used).first()
    if known is None:
        return None
    if known.question != question:
        raise InvalidSetting(
            f"idempotency key {key!r} was used for another question; use a new key for each."
        )
    job = read_or_end(connection, known.job_id, now)
    if job is None:  # it was damaged: the key is free again
        connection.execute(delete(job_keys).where(job_keys.c.job_id == known.job_id))
    return job


def _last_of(connection: Connection, columns: dict[str, str | int], now: datetime) -> Job | None:
    newest = select(jobs.c.id).where(_all_equal(columns)).order_by(jobs.c.sequence.desc()).limit(1)
    row = connection.execute(newest).first()
    return None if row is None else read_or_end(connection, row.id, now)


def _all_equal(columns: dict[str, str | int]) -> ColumnElement[bool]:
    return and_(*(jobs.c[name] == value for name, value in columns.items()))


def _delete_over(connection: Connection, which: ColumnElement[bool]) -> int:
    is_gone = which & ~_IS_IN_FLIGHT
    gone = select(jobs.c.id).where(is_gone)
    connection.execute(delete(job_keys).where(job_keys.c.job_id.in_(gone)))
    count: int = connection.execute(delete(jobs).where(is_gone)).rowcount
    return count
