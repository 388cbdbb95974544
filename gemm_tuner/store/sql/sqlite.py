"""SQLite, the engine of one machine: how connections are set up and transactions begin."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import ConnectionPoolEntry

from gemm_tuner.errors import StoreFailed

BUSY_TIMEOUT_MS = 30_000

# A verdict with its documents and answer is some 4 KiB, and is read with one call of the system.
_PAGE_BYTES = 2**14
_CACHE_BYTES = 2**23
_LOG_BYTES = 2**22  # beside the file, before changes are written into it

_STATE = "state of the files"

# What tells whether a file was changed: its number, size and time.
_State = tuple[tuple[int, int, int] | None, ...]


def create_sqlite_engine(url: URL) -> Engine:
    """Return an engine for the file that `url` names."""
    engine = create_engine(url)
    event.listen(engine, "connect", _set_up)
    event.listen(engine, "begin", _begin)
    if url.database and url.database != ":memory:":
        _follow(engine, Path(url.database))
    return engine


def _follow(engine: Engine, file: Path) -> None:
    """Have connections end whose file was replaced, and refuse to go on where it was removed.

    An open file lives on without its name, so what was written to it would be lost.
    """
    was_there = False

    def check_place(*_connection: Any) -> None:  # noqa: ANN401 - DBAPI
        if was_there and not file.exists():  # SQLite would make an empty one
            raise StoreFailed(f"the database file {file} was removed; put it, or a copy, back.")

    def note(_connection: Any, entry: ConnectionPoolEntry) -> None:  # noqa: ANN401 - DBAPI
        nonlocal was_there
        was_there = True
        entry.info[_STATE] = _place_of(file)

    def check(_connection: Any, entry: ConnectionPoolEntry, _proxy: Any) -> None:  # noqa: ANN401
        place = _place_of(file)
        if place is None:
            check_place()
        if place != entry.info[_STATE]:
            raise DisconnectionError("the file was replaced")  # and so is opened anew

    event.listen(engine, "do_connect", check_place)
    event.listen(engine, "connect", note)
    event.listen(engine, "checkout", check)


def _place_of(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def create_reading_engine(url: URL, file: Path) -> Engine:
    """Return an engine that reads `file` where nothing can be written, not even SQLite's own files.

    A log of changes beside the file is read where SQLite can. Without one the file is all there is,
    and is read as it stands until somebody changes it.
    """
    engine = create_engine(url, creator=lambda: _connect_to_read(file))

    def note(connection: Any, entry: ConnectionPoolEntry) -> None:  # noqa: ANN401 - DBAPI
        if connection.is_file_alone:
            entry.info[_STATE] = connection.state

    def check(_connection: Any, entry: ConnectionPoolEntry, _proxy: Any) -> None:  # noqa: ANN401
        if _STATE in entry.info and entry.info[_STATE] != _state_of(file):
            raise DisconnectionError("the file was changed")  # and so is opened anew

    event.listen(engine, "connect", note)
    event.listen(engine, "checkout", check)
    return engine


class _ReadingConnection(sqlite3.Connection):
    """A connection that writes nothing; `state` is that of the files before it was opened."""

    state: _State = ()
    is_file_alone = False


def _connect_to_read(file: Path) -> sqlite3.Connection:
    state = _state_of(file)
    try:
        return _checked(file, "mode=ro")
    except sqlite3.OperationalError:
        log = Path(f"{file}-wal")
        if log.exists() and log.stat().st_size:
            raise  # the file alone may be half of a change
    connection = _checked(file, "mode=ro&immutable=1")
    connection.state = state
    connection.is_file_alone = True
    return connection


def _checked(file: Path, how: str) -> _ReadingConnection:
    connection = sqlite3.connect(
        f"file:{quote(str(file))}?{how}",
        uri=True,
        timeout=BUSY_TIMEOUT_MS / 1000,
        isolation_level=None,
        check_same_thread=False,
        factory=_ReadingConnection,
    )
    try:
        with closing(connection.execute("SELECT count(*) FROM sqlite_master")) as answer:
            answer.fetchall()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _state_of(file: Path) -> _State:
    return tuple(map(_stamp, (file, Path(f"{file}-wal"))))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _set_up(connection: Any, _entry: ConnectionPoolEntry) -> None:  # noqa: ANN401 - DBAPI
    connection.isolation_level = None  # transactions begin in _begin, not in the driver
    for pragma in (
        f"page_size = {_PAGE_BYTES}",  # of a new database
        f"cache_size = -{_CACHE_BYTES >> 10}",
        f"wal_autocheckpoint = {_LOG_BYTES // _PAGE_BYTES}",  # by pages, which could be smaller
        f"busy_timeout = {BUSY_TIMEOUT_MS}",
        "journal_mode = WAL",
        "synchronous = FULL",  # a trial is on the disk when its commit returns
        "foreign_keys = ON",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if not options.get("asks_once", False):
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("writes") else "BEGIN")
