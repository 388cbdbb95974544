"""Opening the database: where it is, how it is set up, and its schema brought up to date."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from platformdirs import user_data_path
from sqlalchemy import URL, Connection, Engine, create_engine, make_url, select, text
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from gemm_tuner.derive import RULES
from gemm_tuner.domain.printable import quoted
from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.store.sql.creating import create_schema, names_in
from gemm_tuner.store.sql.postgresql import create_postgresql_engine
from gemm_tuner.store.sql.sqlite import create_reading_engine, create_sqlite_engine
from gemm_tuner.store.sql.tables import METADATA, verdict_state
from gemm_tuner.trust.attestation import MeasuringKeys

_ENGINES = {"sqlite": create_sqlite_engine, "postgresql": create_postgresql_engine}
_DRIVERS = {"sqlite": "pysqlite", "postgresql": "psycopg"}
_HOW_TO_WRITE_IT = "write it as sqlite:////folder/file.sqlite3 or postgresql://user@host/database"
_CHECK_FILE = "check its folder's permissions"
_MALFORMED = ("malformed", "no such table", "already exists")  # as SQLite says it
_FULL = ("disk I/O error", "disk is full")  # as SQLite says that, too
_CHECK_DISK = "check its disk, which may be full"
PUT_BACK = "put a copy of it back, which a backup has"
_CHECK_SERVER = "check that its server runs and lets you in"
_NOT_SQLITE = "file is not a database"

MIGRATIONS = Path(__file__).parent / "migrations"


def default_database_url() -> str:
    """Return the URL in the environment variable GEMM_TUNER_DB, or that of the user's database."""
    configured = os.environ.get("GEMM_TUNER_DB")
    if configured:
        return configured
    file = str(default_database_file())
    try:
        file.encode()
    except UnicodeEncodeError:
        raise InvalidSetting(
            f"the database cannot be {quoted(file)}: the name is no text in UTF-8; set "
            "XDG_DATA_HOME to another folder, or name a database with --db or GEMM_TUNER_DB."
        ) from None
    return URL.create("sqlite", database=file).render_as_string()


def default_database_file() -> Path:
    """Return the file of the user's database."""
    return user_data_path("gemm-tuner") / "gemm-tuner.sqlite3"


def open_database(
    url: str | None = None, *, may_create: bool = True, only_reads: bool = False
) -> Engine:
    """Return the database at `url`, at the newest schema; it is created if it is missing.

    With `may_create` false, one that is missing is an error: who only reads has mistyped it. Such
    a caller, and one that `only_reads`, also gets a file that cannot be written, nor its folder, or
    whose disk is full.

    Raises:
        InvalidSetting: `url` is not a database URL, or its driver is not installed.
        StoreFailed: the database cannot be created, opened, written or brought up to date, or is
            missing and may not be created.
    """
    parsed = parse_url(url or default_database_url())
    name = shown(parsed)
    file = _file_of(parsed)
    try:
        if file is not None and file.exists() and not file.is_file():
            raise _no_database(name, f"{file} is not a plain file")
        return _open_to_write(parsed, may_create=may_create)
    except (OSError, SQLAlchemyError) as error:
        if file is not None and _NOT_SQLITE in str(error):
            raise _no_database(name, f"{file} is no SQLite database") from error
        can_be_read = only_reads or not may_create
        if file is not None and can_be_read:
            with suppress(OSError, SQLAlchemyError):
                return _open_to_read(parsed, file)
        to_write = "" if can_be_read else " for writing"
        raise StoreFailed(
            f"the database {name} cannot be opened{to_write}: {reason_of(error)}; "
            f"{_what_to_check(file, error)}, "
            "or name another with --db or GEMM_TUNER_DB."
        ) from error


def is_damage(error: Exception) -> bool:
    """Return whether SQLite said that a file has not all of a database."""
    return any(said in str(error) for said in _MALFORMED)


def _what_to_check(file: Path | None, error: Exception) -> str:
    if file is None:
        return _CHECK_SERVER
    if is_damage(error):
        return PUT_BACK
    return _CHECK_DISK if any(said in str(error) for said in _FULL) else _CHECK_FILE


def _open_to_write(url: URL, *, may_create: bool) -> Engine:
    file = _file_of(url)
    if file is not None and not may_create and not file.exists():
        raise _missing(f"there is no database {shown(url)}")
    if file is not None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create_privately(file)
    create = _ENGINES[url.get_backend_name()]
    # Our engine of SQLite would change the journal of a file that is not known yet.
    to_look = create(url) if file is None else create_engine(url)
    _check_that_it_is_ours(to_look, url, may_be_empty=may_create)
    with _disposed_if_it_fails(create(url)) as engine:
        # A store that needs no change is not written: another may hold its lock.
        if not is_current(engine):
            with writing(engine).begin() as connection:
                if names_in(connection):
                    _migrate(connection, shown(url))
                    _derive_anew(connection)
                else:
                    create_schema(connection, newest_revision())
        return engine


def _open_to_read(url: URL, file: Path) -> Engine:
    _check_that_it_is_ours(create_reading_engine(url, file), url)
    with _disposed_if_it_fails(create_reading_engine(url, file)) as engine:
        with engine.connect() as connection:
            has_newest = _has_newest(connection)  # unless it is damaged, which is an error
            revisions = _revisions(connection)
        if has_newest:
            engine.update_execution_options(is_read_only=True)
            return engine
        if set(revisions).isdisjoint(_known_revisions()):
            raise _unknown_schema(shown(url), f"revision {' and '.join(revisions)}")
        raise StoreFailed(
            f"the database {shown(url)} has an older schema, and cannot be written to bring it up "
            "to date; make its folder writable, or name another with --db or GEMM_TUNER_DB."
        )


@contextmanager
def _disposed_if_it_fails(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    except BaseException:
        engine.dispose()
        raise


def is_read_only(engine: Engine) -> bool:
    """Return whether the database was opened to be read, because it could not be written."""
    return bool(engine.get_execution_options().get("is_read_only", False))


def writing(engine: Engine) -> Engine:
    """Return `engine` for transactions that write.

    SQLite then takes the write lock at the beginning, where waiting for it is safe.
    """
    return engine.execution_options(writes=True)


def asking_once(engine: Engine) -> Engine:
    """Return `engine` for a single query, without what begins and ends a transaction around it."""
    if engine.dialect.name == "sqlite":
        return engine.execution_options(asks_once=True)
    return engine.execution_options(asks_once=True, isolation_level="AUTOCOMMIT")


def is_current(engine: Engine) -> bool:
    """Return whether the database answers, with the newest schema and verdicts by its rules."""
    with suppress(SQLAlchemyError, StoreFailed), engine.connect() as connection:
        return _has_newest(connection)
    return False


def _has_newest(connection: Connection) -> bool:
    """Return whether the schema is the newest, with verdicts by the rules of this version."""
    return _revisions(connection) == [newest_revision()] and _follows_rules(connection)


def _revisions(connection: Connection) -> list[str]:
    """Return what a database says of its schema: one revision, if it is whole."""
    return list(connection.scalars(text("SELECT version_num FROM alembic_version")))


def _follows_rules(connection: Connection) -> bool:
    """Return whether verdicts were derived by the rules of this version."""
    return connection.scalar(select(verdict_state.c.rules)) == RULES


def _derive_anew(connection: Connection) -> None:
    if not _follows_rules(connection):
        # Imported here: it is seldom needed, and reads trials, which takes long to load.
        from gemm_tuner.store.verdicts.deriving import Deriving  # noqa: PLC0415

        Deriving(connection, MeasuringKeys()).derive_all()


def newest_revision() -> str:
    """Return the revision that the schema of this version has: that of the last migration's file.

    Alembic would say the same, but takes longer to load than most commands take to run.
    """
    return _known_revisions()[-1]


@cache
def _known_revisions() -> tuple[str, ...]:
    names = sorted(path.stem for path in (MIGRATIONS / "versions").glob("r[0-9]*.py"))
    return tuple(name.partition("_")[2] for name in names)


def parse_url(url: str) -> URL:
    """Return a database URL, once its engine is known to be here.

    Raises InvalidSetting for what is no URL of SQLite or PostgreSQL.
    """
    try:
        url.encode()  # which no name of bytes in another encoding can be
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InvalidSetting(
            f"database URL {_without_secrets(url)!r} is not understood; {_HOW_TO_WRITE_IT}."
        ) from None
    # SQLAlchemy takes what follows the last one for the host, also where that is in an option.
    if parsed.host and url.count("@") > 1:
        raise InvalidSetting(
            f"database URL {_without_secrets(url)!r} is not understood: it has an '@' too many; "
            "write one that is in a part of it as %40."
        )
    name = shown(parsed)
    if parsed.get_backend_name() not in _ENGINES:
        raise InvalidSetting(
            f"database URL {name} cannot be used: it names neither SQLite nor PostgreSQL; "
            f"{_HOW_TO_WRITE_IT}."
        )
    backend, _plus, driver = parsed.drivername.partition("+")
    if driver != _DRIVERS[backend] and parsed.drivername != backend:
        raise InvalidSetting(
            f"database URL {name} cannot be used: no other driver than {_DRIVERS[backend]} is "
            f"used; begin it with {backend}://."
        )
    _check_parts(parsed, has_query="?" in url)
    try:
        parsed.get_dialect().import_dbapi()
    except ModuleNotFoundError as error:
        raise InvalidSetting(
            f"database URL {name} cannot be used: {error}; "
            'for PostgreSQL run: pip install "gemm-tuner[postgres]".'
        ) from error
    return parsed


def _check_parts(url: URL, *, has_query: bool) -> None:
    """Check the parts of a URL: one of SQLite names a file alone, as it is set up in one way.

    Raises:
        InvalidSetting: a part has a null byte, or it is of SQLite and has options or a host.
    """
    is_file = url.get_backend_name() == "sqlite"
    why = None
    if is_file and any((url.host, url.port, url.username, url.password)):
        why = "SQLite has no host and no user"
    elif "%00" in url.render_as_string(hide_password=False):
        why = "no name has a null byte"
    if why is not None:
        raise InvalidSetting(
            f"database URL {quoted(shown(url))} cannot be used: {why}; {_HOW_TO_WRITE_IT}."
        )
    if is_file and has_query:
        options = ", ".join(repr(quoted(name)) for name in url.query)
        raise InvalidSetting(
            f"database URL {shown(url)} cannot be used: SQLite takes no options here"
            f"{f', such as {options}' if options else ''}; leave out what follows the '?', or "
            "write one in a name as %3F."
        )


def shown(url: URL) -> str:
    """Return a URL as messages show it, without its passwords."""
    hidden = {key: "***" for key in url.query if "password" in key.lower()}
    return url.update_query_dict(hidden).render_as_string()


def _without_secrets(url: str) -> str:
    """Return what is not a URL without what may be a password in it."""
    return re.sub(r"\?.*", "?***", re.sub(r".*@", "***@", url))


def _migrate(connection: Connection, name: str) -> None:
    # Imported here: an old store alone needs a migration, and Alembic takes long to load.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise _unknown_schema(name, str(error)) from error


def database_file(url: str) -> Path | None:
    """Return the file behind a database URL, None if it is on a server or in memory.

    Raises:
        InvalidSetting: `url` is not a database URL, or its driver is not installed.
    """
    return _file_of(parse_url(url))


def is_in_memory(url: str) -> bool:
    """Return whether a URL is that of an SQLite database that no file keeps."""
    with suppress(InvalidSetting):
        return parse_url(url).get_backend_name() == "sqlite" and database_file(url) is None
    return False


def _create_privately(file: Path) -> None:
    """Make an empty file that others cannot read, where there is none; SQLite keeps its mode."""
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _file_of(url: URL) -> Path | None:
    """Return the file of an SQLite database; None of others, and of one in memory."""
    name = url.database or ""
    is_file = url.get_backend_name() == "sqlite" and name not in {"", ":memory:"}
    return Path(name) if is_file else None


def _check_that_it_is_ours(engine: Engine, url: URL, *, may_be_empty: bool = False) -> None:
    """Check that a database is one of gemm-tuner, of any version, and whole; change nothing."""
    try:
        with engine.connect() as connection:
            names = names_in(connection)
            revisions = _revisions(connection) if "alembic_version" in names else []
    finally:
        engine.dispose()
    ours = set(METADATA.tables)
    are_most_there = len(names & ours) > len(ours) / 2
    # Others have tables of these two names, too.
    is_known = are_most_there or not set(revisions).isdisjoint(_known_revisions())
    needed = {"alembic_version", "trials"} | (ours if revisions == [newest_revision()] else set())
    if needed <= names and is_known:
        if len(revisions) != 1 or not revisions[0]:
            raise _damaged(url, "it does not say which schema it has")
        return
    if are_most_there:
        raise _damaged(url, f"it has no table {' and no '.join(sorted(needed - names))} any more")
    if not names and may_be_empty:
        return
    what = f"the database {shown(url)} holds no records of gemm-tuner"
    if not may_be_empty:
        raise _missing(what)
    if _file_of(url) is not None:  # a server's database may be shared
        raise StoreFailed(
            f"{what}, but tables of another program; name another with --db or GEMM_TUNER_DB."
        )


def _damaged(url: URL, why: str) -> StoreFailed:
    return StoreFailed(
        f"the database {shown(url)} is damaged, {why}; {PUT_BACK}, or name another with --db or "
        "GEMM_TUNER_DB."
    )


def _unknown_schema(name: str, why: str) -> StoreFailed:
    return StoreFailed(
        f"the database {name} has a schema this version does not know ({why}); "
        "update gemm-tuner, or name another with --db or GEMM_TUNER_DB."
    )


def _missing(what: str) -> StoreFailed:
    return StoreFailed(
        f'{what}; "gemm-tuner sweep" makes one, or name another with --db or GEMM_TUNER_DB.'
    )


def _no_database(name: str, why: str) -> StoreFailed:
    return StoreFailed(
        f"the database {name} cannot be opened: {why}; name another with --db or GEMM_TUNER_DB."
    )


def reason_of(error: Exception) -> str:
    """Return what a driver said, on one line."""
    return " ".join(str(getattr(error, "orig", None) or error).split())
