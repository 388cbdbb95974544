"""Transactions that read or write, and the statements that all tables share."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from sqlalchemy import Connection, Engine, Row, Select, Table, select, update
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from gemm_tuner.errors import GemmTunerError, InvalidSetting, StoreFailed
from gemm_tuner.store.sql.database import (
    PUT_BACK,
    asking_once,
    is_damage,
    reason_of,
    shown,
    writing,
)
from gemm_tuner.store.sql.tables import verdict_state
from gemm_tuner.trust.attestation import MeasuringKeys

_NO_TEXT = "Could not decode to UTF-8"  # what SQLite says of a text that is none
_DAMAGE = (
    'it was damaged; "gemm-tuner db check" tells of the rows, and "gemm-tuner db derive" makes '
    "verdicts anew. Else restore it from a backup, or start a new one with --db."
)


class RowsDamaged(StoreFailed):
    """A row holds what nothing of this package stores; the database itself answers."""


class Statements:
    """The parent of what reads and writes tables: transactions on one database.

    Every method, here and in what follows from it, raises `StoreFailed` when the database does not
    answer or holds a row that does not match its key. What is measured is attested with `keys`, and
    only what they believe is a reason to serve a kernel; by default they are this user's. So many
    hosts as a `quorum` says must have found the same; by default as many as the database says.
    """

    def __init__(
        self, engine: Engine, keys: MeasuringKeys | None = None, *, quorum: int | None = None
    ) -> None:
        self._engine = engine
        self._quorum = quorum
        self._keys = keys or MeasuringKeys()
        self._writer = writing(engine)
        self._asker = asking_once(engine)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with translated_errors(self._engine), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with translated_errors(self._engine), self._writer.begin() as connection:
            yield connection

    @contextmanager
    def _asking_once(self) -> Iterator[Connection]:
        """Yield a connection for one query, which needs no transaction around it."""
        with translated_errors(self._engine), self._asker.connect() as connection:
            yield connection

    def _first(self, query: Select[*tuple[Any, ...]]) -> Row[*tuple[Any, ...]] | None:
        with self._asking_once() as connection:
            return connection.execute(query).first()


def note_change(connection: Connection) -> None:
    """Let who keeps answers see that verdicts changed, or what is revoked.

    The count grows by a random number: one that was put back from a backup, and changed anew, does
    not come to a number that it had before.
    """
    grown = verdict_state.c.changes + 1 + secrets.randbelow(2**32)
    connection.execute(update(verdict_state).values(changes=grown))


def read_quorum(connection: Connection) -> int:
    """Return how many hosts must find the same before a kernel is named."""
    return int(connection.scalar(select(verdict_state.c.quorum)) or 1)


def insert_new(connection: Connection, table: Table, **values: str | float | bytes | None) -> bool:
    """Insert a row unless its key is there, and return whether it was inserted."""
    return upsert(connection, table, values, {})


def upsert(
    connection: Connection, table: Table, values: Mapping[str, Any], changed: Mapping[str, Any]
) -> bool:
    """Insert a row, or change the one with its key; return whether anything was written."""
    insert = _insert_new(connection.dialect.name, table)
    if changed:
        key = list(table.primary_key.columns)
        insert = _insert(connection.dialect.name, table)
        insert = insert.on_conflict_do_update(index_elements=key, set_=dict(changed))
    options = {"preserve_rowcount": True}
    counted = connection.execute(insert, dict(values), execution_options=options)
    return bool(counted.rowcount == 1)


def insert_or_replace(connection: Connection, table: Table, **values: str | float | bytes) -> None:
    """Insert a row in the place of one with its key, if there is one."""
    upsert(connection, table, values, values)


@cache
def _insert_new(dialect: str, table: Table) -> Any:  # noqa: ANN401 - each dialect has its own
    """Return the one statement for all new rows: to make and compile one takes milliseconds."""
    return _insert(dialect, table).on_conflict_do_nothing()


def _insert(dialect: str, table: Table) -> Any:  # noqa: ANN401 - each dialect has its own
    # Looked up by name: loading both dialects takes longer than most questions.
    return import_module(f"sqlalchemy.dialects.{dialect}").insert(table)


def may_pass(error: StoreFailed) -> bool:
    """Return whether what failed may be done later: a disk or a server refused it, not a row."""
    return isinstance(error.__cause__, OSError | OperationalError | InterfaceError)


def is_of_database(error: Exception) -> bool:
    """Return whether a driver could not do its work, rather than a row held what is no text."""
    return isinstance(error, DBAPIError) and _NO_TEXT not in str(error.orig)


@contextmanager
def translated_errors(engine: Engine | None = None) -> Iterator[None]:
    """Turn what a driver raises into `StoreFailed`, or `InvalidSetting` for what is no text.

    So is a value of a type that nothing of this package stores: SQLite keeps any in any column.
    The database of `engine` is named where it is damaged as a whole.
    """
    try:
        yield
    except GemmTunerError:
        raise
    except UnicodeEncodeError as error:
        raise InvalidSetting(
            f"{error.object!a} is no text in UTF-8, and cannot be kept or found; correct it."
        ) from None
    except SQLAlchemyError as error:
        if isinstance(error, DBAPIError) and not is_of_database(error):
            raise RowsDamaged(f"the database holds text that is none: {_DAMAGE}") from error
        what_to_do = "check its disk, permissions and other processes, then try again"
        if engine is not None and engine.dialect.name == "sqlite" and is_damage(error):
            what_to_do = f"{shown(engine.url)} is damaged: {PUT_BACK}"
        raise StoreFailed(
            f"the database did not do what was asked: {reason_of(error)}; {what_to_do}."
        ) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise RowsDamaged(
            f"the database holds what gemm-tuner did not store ({error}): {_DAMAGE}"
        ) from error
