"""The rows of all tables alike: what identifies one, and whether it is whole.

Copying and checking a database go by what is said here, so that a new table is copied and checked.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Column, RowMapping, Table, UniqueConstraint

from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.integrity import check_document, check_named_source, decompress
from gemm_tuner.store.jobs.rows import check_question
from gemm_tuner.store.reading import check_columns
from gemm_tuner.store.revocations import check_stored_number, check_stored_subject
from gemm_tuner.store.sql.tables import (
    METADATA,
    artifacts,
    contributions,
    cpus,
    jobs,
    misses,
    problems,
    revocations,
    sources,
    trials,
)
from gemm_tuner.store.wire.record import parse_record

# What follows from other tables, and is derived again where it is missing.
DERIVED = frozenset({"verdicts", "verdict_state"})
# What tells of processes that run now, beside this database.
_OF_NOW = frozenset({"workers"})


def stored_tables() -> tuple[Table, ...]:
    """Return the tables that nothing can derive, those that others refer to first."""
    return tuple(table for table in METADATA.sorted_tables if table.name not in DERIVED | _OF_NOW)


def number_of(table: Table) -> Column[int] | None:
    """Return the column that numbers rows in the order of insertion, where a table has one."""
    return table.autoincrement_column


def key_of(table: Table) -> tuple[Column[Any], ...]:
    """Return the columns that identify a row in any database: not its number."""
    if number_of(table) is None:
        return tuple(table.primary_key.columns)
    for constraint in table.constraints:
        if isinstance(constraint, UniqueConstraint):
            return tuple(constraint.columns)
    return tuple(column for column in table.columns if not column.primary_key)


def check_row(table: Table, row: RowMapping) -> None:
    """Check that the bytes of a row are those that its key was made from, and its columns fit.

    Raises:
        StoreFailed: they are not, or one is of another type.
        InvalidRecord: the document of a trial is none.
    """
    for column in table.columns:
        value = row[column.name]
        if value is None or isinstance(value, column.type.python_type):
            continue
        raise StoreFailed(
            f"the column {column.name} has a {type(value).__name__}, where gemm-tuner stores a "
            f"{column.type.python_type.__name__}."
        )
    check = _CHECKS.get(table.name)
    if check is not None:
        check(row)


def shown_key(table: Table, row: RowMapping) -> str:
    """Return how a message names a row."""
    return " ".join(str(row[column.name])[:16] for column in key_of(table))


def _check_trial(row: RowMapping) -> None:
    check_document("trial", row["id"], row["document"])
    check_columns(parse_record(row["document"]), row)


def _check_artifact(row: RowMapping) -> None:
    decompress("artifact", row["sha256"], row["compressed_binary"])
    if f'"sha256":"{row["sha256"]}"' not in row["document"]:
        raise StoreFailed(f"the description of the artifact {row['sha256'][:12]} is of another.")
    check_named_source(row["sha256"], row["document"], row["source_sha256"])


def _check_revocation(row: RowMapping) -> None:
    check_stored_number(row["number"])
    check_stored_subject(row["subject"])


_CHECKS: dict[str, Callable[[RowMapping], object]] = {
    problems.name: lambda row: check_document("problem", row["id"], row["document"]),
    cpus.name: lambda row: check_document("CPU", row["id"], row["document"]),
    trials.name: _check_trial,
    sources.name: lambda row: decompress("source", row["sha256"], row["compressed_text"]),
    artifacts.name: _check_artifact,
    contributions.name: lambda row: decompress("contribution", row["sha256"], row["compressed"]),
    revocations.name: _check_revocation,
    jobs.name: lambda row: check_question(row["problem_id"], row["problem"]),
    misses.name: lambda row: check_question(row["problem_id"], row["problem"]),
}


def references(table: Table) -> Sequence[tuple[str, Table, str]]:
    """Return each column that refers to another table, that table, and its column."""
    return [
        (key.parent.name, key.column.table, key.column.name)
        for key in sorted(table.foreign_keys, key=lambda key: key.parent.name)
    ]
