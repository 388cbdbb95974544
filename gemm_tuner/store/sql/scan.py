"""Reading whole tables in one snapshot, some rows at a time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Column, Connection, Engine, RowMapping, Table, func, select, tuple_

from gemm_tuner.store.sql.statements import translated_errors

ROWS_AT_ONCE = 100


@contextmanager
def snapshot(engine: Engine) -> Iterator[Connection]:
    """Yield a connection that sees the database as it is now, whatever others write."""
    if engine.dialect.name == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with translated_errors(engine), engine.connect() as connection:
        yield connection


def count_rows(connection: Connection, table: Table) -> int:
    """Return how many rows a table has."""
    return connection.execute(select(func.count()).select_from(table)).scalar_one()


def read_chunks(
    connection: Connection, table: Table, columns: Sequence[Column[Any]]
) -> Iterator[Sequence[RowMapping]]:
    """Yield `columns` of all rows in the order of the primary key, `ROWS_AT_ONCE` at a time."""
    key = tuple(table.primary_key.columns)
    names = [column.name for column in key]
    wanted = [*columns, *(column for column in key if column not in columns)]
    query = select(*wanted).order_by(*key).limit(ROWS_AT_ONCE)
    rows = connection.execute(query).mappings().all()
    while rows:
        yield rows
        last = tuple(rows[-1][name] for name in names)
        later = query.where(tuple_(*key) > tuple_(*last))
        rows = connection.execute(later).mappings().all()
