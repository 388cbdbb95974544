"""Opening the database: where it is, how it is set up, and its schema brought up to date."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from platformdirs import user_data_path
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from gemm_tuner.errors import InvalidSetting, StoreFailed

BUSY_TIMEOUT_MS = 30_000

_MIGRATIONS = Path(__file__).parent / "migrations"


def default_database_url() -> str:
    """Return the URL in the environment variable GEMM_TUNER_DB, or that of the user's database."""
    configured = os.environ.get("GEMM_TUNER_DB")
    if configured:
        return configured
    path = user_data_path("gemm-tuner") / "gemm-tuner.sqlite3"
    return URL.create("sqlite", database=str(path)).render_as_string()


def open_database(url: str | None = None) -> Engine:
    """Return the database at `url`, created if it is missing and at the newest schema.

    Raises:
        InvalidSetting: `url` is not a database URL, or its driver is not installed.
        StoreFailed: the database cannot be created, opened, written or brought up to date.
    """
    parsed = _parse(url or default_database_url())
    shown = parsed.render_as_string()
    try:
        if parsed.get_backend_name() == "sqlite" and parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        engine = _create_engine(parsed)
        # A store that needs no change is not written: another may hold its lock.
        if not is_current(engine):
            with writing(engine).begin() as connection:
                _migrate(connection)
    except (OSError, SQLAlchemyError) as error:
        raise StoreFailed(
            f"the database {shown} cannot be opened for writing: {_reason(error)}; "
            "check its folder's permissions, or name another with --db or GEMM_TUNER_DB."
        ) from error
    except CommandError as error:
        raise StoreFailed(
            f"the database {shown} has a schema this version does not know ({error}); "
            "update gemm-tuner, or name another with --db or GEMM_TUNER_DB."
        ) from error
    return engine


def writing(engine: Engine) -> Engine:
    """Return `engine` for transactions that write.

    SQLite then takes the write lock at the beginning, where waiting for it is safe.
    """
    return engine.execution_options(writes=True)


def is_current(engine: Engine) -> bool:
    """Return whether the database answers and has the newest schema."""
    newest = ScriptDirectory(str(_MIGRATIONS)).get_current_head()
    with suppress(SQLAlchemyError), engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision() == newest
    return False


def _parse(url: str) -> URL:
    shown = repr(url)
    try:
        parsed = make_url(url)
        shown = parsed.render_as_string()
        parsed.get_dialect().import_dbapi()
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError, ValueError) as error:
        raise InvalidSetting(
            f"database URL {shown} cannot be used: {error}; "
            "write it as sqlite:////folder/file.sqlite3."
        ) from error
    return parsed


def _create_engine(url: URL) -> Engine:
    engine = create_engine(url)
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _entry: ConnectionPoolEntry) -> None:  # noqa: ANN401 - DBAPI
    connection.isolation_level = None  # transactions begin in _begin_sqlite, not in the driver
    for pragma in (
        f"busy_timeout = {BUSY_TIMEOUT_MS}",
        "journal_mode = WAL",
        "synchronous = FULL",  # a trial is on the disk when its commit returns
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(connection: Connection) -> None:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    command.upgrade(config, "head")


def _reason(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error)
