"""Checking that a database is whole: each row against its digest, and what refers to others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, RowMapping, Table, select, tuple_
from sqlalchemy.exc import DBAPIError

from gemm_tuner.errors import InvalidRecord, StoreFailed
from gemm_tuner.store.maintenance.rows import check_row, references, shown_key, stored_tables
from gemm_tuner.store.sql.scan import count_rows, read_chunks, snapshot
from gemm_tuner.store.sql.statements import is_of_database

# What reading a row raises that holds what is of no type of its column, or no text.
_UNREADABLE = (TypeError, ValueError, DBAPIError)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """How many rows were looked at, and what is wrong with some."""

    rows: int
    damages: tuple[str, ...]


def check_database(engine: Engine, tell: Callable[[str, int, int], None]) -> CheckReport:
    """Check every row of a snapshot; `tell` is told the table, the rows so far, and of how many.

    Raises:
        StoreFailed: the database does not answer.
    """
    damages: list[str] = []
    rows = 0
    with snapshot(engine) as connection:
        damages += _faults_of_file(connection)
        total = sum(count_rows(connection, table) for table in stored_tables())
        for table in stored_tables():
            before = rows
            try:
                for chunk in read_chunks(connection, table, tuple(table.columns)):
                    damages += _damages(table, chunk)
                    rows += len(chunk)
                    tell(table.name, rows, total)
            except _UNREADABLE as error:
                if is_of_database(error):
                    raise
                rows = before + count_rows(connection, table)
                damages += _unreadable(connection, table)
                tell(table.name, rows, total)
        damages += _orphans(connection)
    return CheckReport(rows=rows, damages=tuple(damages))


def check_newest(engine: Engine, rows_of_each: int) -> CheckReport:
    """Check the last rows of each table, as many at most; of tables without numbers, any.

    Raises:
        StoreFailed: the database does not answer.
    """
    damages: list[str] = []
    rows = 0
    with snapshot(engine) as connection:
        for table in stored_tables():
            key = (column.desc() for column in table.primary_key.columns)
            last = select(table).order_by(*key).limit(rows_of_each)
            found = connection.execute(last).mappings().all()
            damages += _damages(table, found)
            rows += len(found)
    return CheckReport(rows=rows, damages=tuple(damages))


def _damages(table: Table, rows: Sequence[RowMapping]) -> Iterator[str]:
    for row in rows:
        try:
            check_row(table, row)
        except (StoreFailed, InvalidRecord, TypeError, ValueError, AttributeError) as error:
            yield f"{table.name} {shown_key(table, row)}: {error}"


def _unreadable(connection: Connection, table: Table) -> Iterator[str]:
    """Yield what is wrong with the rows of a table that cannot be read, each read on its own."""
    key = tuple(table.primary_key.columns)
    try:
        keys = connection.execute(select(*key)).all()
    except _UNREADABLE as error:
        yield f"{table.name}: its keys cannot be read: {_first_line(error)}"
        return
    for values in keys:
        name = ", ".join(str(value)[:16] for value in values)
        try:
            connection.execute(select(table).where(tuple_(*key) == tuple_(*values))).one()
        except _UNREADABLE as error:
            yield f"{table.name} {name}: cannot be read: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _faults_of_file(connection: Connection) -> Iterator[str]:
    """Yield what SQLite finds wrong with its file; PostgreSQL looks after its own."""
    if connection.dialect.name == "sqlite":
        for (told,) in connection.exec_driver_sql("PRAGMA integrity_check"):
            if told != "ok":
                yield f"file: {told}"


def _orphans(connection: Connection) -> Iterator[str]:
    for table in stored_tables():
        for column, other, name in references(table):
            lost = (
                select(table)
                .outerjoin(other, other.c[name] == table.c[column])
                .where(table.c[column].is_not(None), other.c[name].is_(None))
            )
            for row in connection.execute(lost).mappings():
                key = str(row[column])[:16]
                yield f"{table.name} {shown_key(table, row)}: {other.name} has no {key}"
