"""Which processes run jobs, for CPUs of which class; one that was not heard of for long is gone."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, insert, select

from gemm_tuner.store.jobs.rows import time_text
from gemm_tuner.store.sql.statements import Statements
from gemm_tuner.store.sql.tables import workers

ALIVE = timedelta(minutes=1)
MAX_SHOWN = 200
_FORGOTTEN = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that runs jobs for CPUs of a class, and the job that it runs, if any.

    `key` is its public measuring key in hex, None of one of an older version.
    """

    name: str
    class_key: str
    job_id: str | None
    key: str | None = None


class Workers(Statements):
    """The workers of one database."""

    def see_worker(
        self, name: str, *, class_key: str, cpu_key: str, now: datetime, job_id: str | None = None
    ) -> None:
        """Note that a worker lives, and which job it runs; forget those that are long gone."""
        key = self._keys.own_made()
        row = {"class_key": class_key, "cpu_key": cpu_key, "job_id": job_id, "key": key}
        is_old = workers.c.seen_at < time_text(now - _FORGOTTEN)
        with self._writing() as connection:
            connection.execute(delete(workers).where(is_old | (workers.c.name == name)))
            connection.execute(insert(workers).values(name=name, seen_at=time_text(now), **row))

    def forget_worker(self, name: str) -> None:
        """Note that a worker ended."""
        with self._writing() as connection:
            connection.execute(delete(workers).where(workers.c.name == name))

    def alive(self, now: datetime) -> tuple[Worker, ...]:
        """Return the workers that were heard of within the last minute, at most `MAX_SHOWN`."""
        query = select(workers).where(is_alive(now)).order_by(workers.c.name).limit(MAX_SHOWN)
        with self._reading() as connection:
            return tuple(
                Worker(name=row.name, class_key=row.class_key, job_id=row.job_id, key=row.key)
                for row in connection.execute(query)
            )

    def has_worker(
        self, class_key: str, now: datetime, *, measured_by: Collection[str] = ()
    ) -> bool:
        """Return whether a worker for this class of CPUs was heard of within the last minute.

        One that attests with a key of those that `measured_by` names is none.
        """
        query = select(workers.c.name).where(workers.c.class_key == class_key, is_alive(now))
        if measured_by:
            query = query.where(workers.c.key.not_in(sorted(measured_by)))
        return self._first(query.limit(1)) is not None


def is_alive(now: datetime) -> ColumnElement[bool]:
    """Return whether a worker was heard of; what a clock wrote that was ahead says nothing."""
    return workers.c.seen_at.between(time_text(now - ALIVE), time_text(now + ALIVE))
