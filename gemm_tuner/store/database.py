"""Opening the database: where it is, how it is set up, and its schema brought up to date."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from platformdirs import user_data_path
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
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


def open_database(url: str | None = None, *, may_create: bool = True) -> Engine:
    """Return the database at `url`, at the newest schema; it is created if it is missing.

    With `may_create` false, one that is missing is an error: who only reads has mistyped it.

    Raises:
        InvalidSetting: `url` is not a database URL, or its driver is not installed.
        StoreFailed: the database cannot be created, opened, written or brought up to date, or is
            missing and may not be created.
    """
    parsed = _parse(url or default_database_url())
    shown = parsed.render_as_string()
    try:
        file = _file_of(parsed)
        if file is not None and not may_create and not file.exists():
            raise _missing(f"there is no database {shown}")
        if file is not None:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create_privately(file)
        if not may_create and not _is_ours(parsed):
            raise _missing(f"the database {shown} holds no records of gemm-tuner")
        engine = _create_engine(parsed)
        # A store that needs no change is not written: another may hold its lock.
        if not is_current(engine):
            with writing(engine).begin() as connection:
                _migrate(connection, shown)
    except (OSError, SQLAlchemyError) as error:
        raise StoreFailed(
            f"the database {shown} cannot be opened for writing: {_reason(error)}; "
            "check its folder's permissions, or name another with --db or GEMM_TUNER_DB."
        ) from error
    return engine


def writing(engine: Engine) -> Engine:
    """Return `engine` for transactions that write.

    SQLite then takes the write lock at the beginning, where waiting for it is safe.
    """
    return engine.execution_options(writes=True)


def is_current(engine: Engine) -> bool:
    """Return whether the database answers and has the newest schema."""
    with suppress(SQLAlchemyError), engine.connect() as connection:
        found = connection.scalars(text("SELECT version_num FROM alembic_version")).all()
        return list(found) == [newest_revision()]
    return False


def newest_revision() -> str:
    """Return the revision that the schema of this version has: that of the last migration's file.

    Alembic would say the same, but takes longer to load than most commands take to run.
    """
    last = max(path.stem for path in (_MIGRATIONS / "versions").glob("r[0-9]*.py"))
    return last.partition("_")[2]


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


def _migrate(connection: Connection, shown: str) -> None:
    # Imported here: a store seldom needs a migration, and Alembic takes long to load.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StoreFailed(
            f"the database {shown} has a schema this version does not know ({error}); "
            "update gemm-tuner, or name another with --db or GEMM_TUNER_DB."
        ) from error


def database_file(url: str) -> Path | None:
    """Return the file behind a database URL, None if it is on a server or in memory.

    Raises:
        InvalidSetting: `url` is not a database URL, or its driver is not installed.
    """
    return _file_of(_parse(url))


def _create_privately(file: Path) -> None:
    """Make an empty file that others cannot read, where there is none; SQLite keeps its mode."""
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _file_of(url: URL) -> Path | None:
    """Return the file of an SQLite database; None of others, and of one in memory."""
    name = url.database or ""
    is_file = url.get_backend_name() == "sqlite" and name not in {"", ":memory:"}
    return Path(name) if is_file and not name.startswith("file:") else None


def _is_ours(url: URL) -> bool:
    """Return whether the database is one of gemm-tuner, of any version; change nothing."""
    engine = create_engine(url)
    try:
        return {"alembic_version", "trials"} <= set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def _missing(what: str) -> StoreFailed:
    return StoreFailed(
        f'{what}; "gemm-tuner sweep" makes one, or name another with --db or GEMM_TUNER_DB.'
    )


def _reason(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error)
