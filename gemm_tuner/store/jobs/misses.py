"""What was asked for and is not tuned: counted, so that the most wanted can be tuned first."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import and_, delete, exists, func, select, tuple_

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.jobs.rows import question_columns, read_question, time_text
from gemm_tuner.store.sql.statements import Statements, upsert
from gemm_tuner.store.sql.tables import misses, verdicts

MAX_MISSES = 10_000
MAX_AT_ONCE = 1_000
# Of the bound. New rows have been asked for least, and need room until they were asked for more.
_KEPT_BEYOND_BOUND = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A question without a tuned answer: a problem, for CPUs of a class, in a context."""

    problem: Problem
    class_key: str
    context: ExecutionContext


@dataclass(frozen=True, slots=True, kw_only=True)
class MissCount:
    """How often a question was asked that has no tuned answer, and when first and last."""

    problem: Problem
    class_key: str
    context: ExecutionContext
    count: int
    first_at: datetime
    last_at: datetime


class Misses(Statements):
    """The counted misses of one database."""

    def add(self, counts: Mapping[Miss, int], now: datetime) -> None:
        """Count questions; beyond `MAX_MISSES` of them, those that were asked least are dropped."""
        at = time_text(now)
        with self._writing() as connection:
            for miss, count in counts.items():
                columns = question_columns(miss.problem, miss.class_key, miss.context)
                upsert(
                    connection,
                    misses,
                    {
                        **columns,
                        "problem": miss.problem.text,
                        "asked": count,
                        "first_at": at,
                        "last_at": at,
                    },
                    {"asked": misses.c.asked + count, "last_at": at},
                )
            rows = connection.scalar(select(func.count()).select_from(misses)) or 0
            if rows > MAX_MISSES:
                key = list(misses.primary_key.columns)
                least = select(*key).order_by(misses.c.asked, misses.c.last_at)
                excess = rows - int(_KEPT_BEYOND_BOUND * MAX_MISSES)
                connection.execute(delete(misses).where(tuple_(*key).in_(least.limit(excess))))

    def most_wanted(self, limit: int, *, class_key: str | None = None) -> tuple[MissCount, ...]:
        """Return what was asked for most, at most `limit`, and what was measured since left out."""
        row = misses.c
        is_measured = exists().where(
            and_(
                verdicts.c.problem_id == row.problem_id,
                verdicts.c.class_key == row.class_key,
                verdicts.c.threads == row.threads,
                verdicts.c.regime == row.regime,
                verdicts.c.document.is_not(None),
            )
        )
        query = (
            select(misses)
            .where(~is_measured)
            .order_by(row.asked.desc(), row.last_at.desc(), row.problem_id)
            .limit(min(limit, MAX_AT_ONCE))
        )
        if class_key is not None:
            query = query.where(row.class_key == class_key)
        with self._reading() as connection:
            found = connection.execute(query).all()
            return tuple(
                MissCount(
                    problem=problem,
                    class_key=of_class,
                    context=context,
                    count=each.asked,
                    first_at=datetime.fromisoformat(each.first_at),
                    last_at=datetime.fromisoformat(each.last_at),
                )
                for each in found
                for problem, of_class, context in [read_question(misses, each)]
            )
