"""Reading jobs for a service: many at once, those of a question, and those that a caller may see.

Who asks what somebody else's job does already gets that job, and may see it too.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Row, func, or_, select

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.jobs.rows import question_columns, read_job, select_jobs
from gemm_tuner.store.sql.statements import (
    RowsDamaged,
    Statements,
    insert_new,
    translated_errors,
)
from gemm_tuner.store.sql.tables import job_keys, jobs


class JobViews(Statements):
    """The jobs of one database, as a service reads them."""

    def several(self, ids: Collection[str]) -> Mapping[str, Job | StoreFailed]:
        """Return the jobs of these ids that there are, or what is wrong with those damaged."""
        query = select_jobs().where(jobs.c.id.in_(ids))
        try:
            with self._reading() as connection:
                rows = connection.execute(query).all()
        except RowsDamaged as error:
            if len(ids) == 1:
                return dict.fromkeys(ids, error)
            # A text that is none: it spoils the query of all.
            each, middle = [*ids], len(ids) // 2
            return {**self.several(each[:middle]), **self.several(each[middle:])}
        return {row.id: _job_or_fault(row) for row in rows}

    def last_of(self, problem: Problem, *, class_key: str, context: ExecutionContext) -> Job | None:
        """Return the job for a question that was asked for last, None if none was."""
        columns = question_columns(problem, class_key, context)
        query = select_jobs().where(*(jobs.c[name] == value for name, value in columns.items()))
        row = self._first(query.order_by(jobs.c.sequence.desc()).limit(1))
        with translated_errors():
            return None if row is None else read_job(row)

    def newest(
        self,
        limit: int,
        *,
        owner: str | None = None,
        state: JobState | None = None,
        before: str | None = None,
    ) -> tuple[Job, ...]:
        """Return the jobs of `newest_ids`, without damaged ones."""
        ids = self.newest_ids(limit, owner=owner, state=state, before=before)
        found = self.several(ids)
        each = (found.get(one) for one in ids)
        return tuple(job for job in each if isinstance(job, Job))

    def newest_ids(
        self,
        limit: int,
        *,
        owner: str | None = None,
        state: JobState | None = None,
        before: str | None = None,
    ) -> Sequence[str]:
        """Return the ids of the jobs that were asked for last, the newest first.

        With an owner, only those that this owner asked for, also where they were there already;
        `before` is the id of a job, and only those that were asked for before it are returned.
        """
        query = select(jobs.c.id).order_by(jobs.c.sequence.desc()).limit(limit)
        if before is not None:
            which = select(jobs.c.sequence).where(jobs.c.id == before).scalar_subquery()
            query = query.where(jobs.c.sequence < which)
        if state is not None:
            query = query.where(jobs.c.state == state.value)
        if owner is not None:
            shared = select(job_keys.c.job_id).where(job_keys.c.owner == owner)
            query = query.where(or_(jobs.c.owner == owner, jobs.c.id.in_(shared)))
        with self._reading() as connection:
            return connection.scalars(query).all()

    def share(self, job: Job, owner: str) -> None:
        """Let an owner see a job of somebody else, who asked the same before."""
        if not self.is_shared(job.id, owner):
            with self._writing() as connection:
                insert_new(
                    connection,
                    job_keys,
                    owner=owner,
                    idempotency_key=f"\N{RIGHTWARDS ARROW} {job.id}",  # none that a caller may send
                    question="",
                    job_id=job.id,
                )

    def is_shared(self, job_id: str, owner: str) -> bool:
        """Return whether an owner asked for a job, as its first or as another."""
        query = select(job_keys.c.job_id).where(
            job_keys.c.owner == owner, job_keys.c.job_id == job_id
        )
        return self._first(query.limit(1)) is not None

    def counts(self) -> Mapping[JobState, int]:
        """Return how many jobs are in each state."""
        query = select(jobs.c.state, func.count()).group_by(jobs.c.state)
        with self._reading() as connection:
            found = {JobState(state): count for state, count in connection.execute(query)}
        return {state: found.get(state, 0) for state in JobState}


def _job_or_fault(row: Row[*tuple[Any, ...]]) -> Job | StoreFailed:
    try:
        with translated_errors():
            return read_job(row)
    except StoreFailed as error:
        return error
