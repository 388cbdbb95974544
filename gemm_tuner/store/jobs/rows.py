"""Rows of jobs: what their columns say."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Row, Select, Table, select

from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.job import Job, JobProgress, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.integrity import as_row, check_document, check_types
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.sql.tables import jobs


def question_columns(
    problem: Problem, class_key: str, context: ExecutionContext
) -> dict[str, str | int]:
    """Return the columns that tell one question from another, in the tables of this kind."""
    return {
        "problem_id": problem_id(problem),
        "class_key": class_key,
        "threads": context.threads,
        "regime": context.regime.value,
    }


def check_question(key: str, problem: str) -> None:
    """Check that the text of a problem is that its key was made from.

    Raises:
        StoreFailed: it is another.
    """
    check_document("problem", key, canonical_json(problem))


def read_question(
    table: Table, row: Row[*tuple[Any, ...]]
) -> tuple[Problem, str, ExecutionContext]:
    """Return the problem, class and context of a row of a table.

    Raises:
        StoreFailed: the problem does not match its key, or a value not the type of its column.
    """
    check_types(table, row)
    check_question(row.problem_id, row.problem)
    context = ExecutionContext(threads=row.threads, regime=Regime(row.regime))
    return Problem.parse(row.problem), row.class_key, context


def select_jobs() -> Select[*tuple[Any, ...]]:
    """Return the query for rows that `read_job` takes."""
    return select(jobs)


def read_job(row: Row[*tuple[Any, ...]]) -> Job:
    """Return the job of a row.

    Raises:
        StoreFailed: its problem does not match its key, or nothing of this package stored it so.
    """
    with as_row(f"job {row.id}"):
        return _job_of(row)


def _job_of(row: Row[*tuple[Any, ...]]) -> Job:
    problem, class_key, context = read_question(jobs, row)
    return Job(
        id=row.id,
        problem=problem,
        class_key=class_key,
        context=context,
        budget_s=row.budget_s,
        priority=row.priority,
        state=JobState(row.state),
        owner=row.owner,
        created_at=datetime.fromisoformat(row.created_at),
        changed_at=datetime.fromisoformat(row.changed_at),
        worker=row.worker,
        attempts=row.attempts,
        progress=JobProgress(
            tried=row.tried,
            failed=row.failed,
            best_ns=row.best_ns,
            over_baseline=row.over_baseline,
            seconds_left=row.seconds_left,
        ),
        revision=row.revision,
        is_cancel_asked=row.is_cancel_asked,
        detail=row.detail,
        measured_by=frozenset((row.measured_by or "").split()),
    )


def time_text(time: datetime) -> str:
    """Return a time with milliseconds, in UTC; texts of times sort as the times do."""
    return time.astimezone(UTC).isoformat(timespec="milliseconds")
