"""PostgreSQL, the engine of a fleet: how connections are set up and transactions begin."""

from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event

POOL_SIZE = 5
MORE_AT_ONCE = 5
POOL_TIMEOUT_S = 10

# What the URL of a database says of these comes first.
_SETTINGS = {
    "application_name": "gemm-tuner",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "tcp_user_timeout": "30000",  # in ms; a cut network is an error by then
    "options": (
        "-c statement_timeout=60s -c lock_timeout=30s -c idle_in_transaction_session_timeout=60s"
    ),
}
_BINARY = 1  # as psycopg's Format.BINARY
# Any number; who holds it in a database is the one that writes.
_WRITE_LOCK = 0x67656D6D


def create_postgresql_engine(url: URL) -> Engine:
    """Return an engine for the database that `url` names, with a bounded number of connections.

    A connection that the server has closed is replaced before it is used.
    """
    engine = create_engine(
        url.set(query={**_SETTINGS, **url.query}),
        pool_size=POOL_SIZE,
        pool_use_lifo=True,  # each connection plans its queries for itself
        max_overflow=MORE_AT_ONCE,
        pool_timeout=POOL_TIMEOUT_S,
        pool_pre_ping=True,
    )
    event.listen(engine, "begin", _begin)
    event.listen(engine, "before_cursor_execute", _let_bytes_come_as_they_are)
    return engine


def _let_bytes_come_as_they_are(
    connection: Connection,
    cursor: Any,  # noqa: ANN401 - DBAPI
    *_statement: object,
) -> None:
    """Have a single query answered in binary, and not in text with bytes in hex."""
    if connection.get_execution_options().get("asks_once", False):
        cursor.format = _BINARY


def _begin(connection: Connection) -> None:
    """Let one transaction write at a time, as SQLite does.

    Numbers of trials are then committed in their order: who has read up to one misses none.
    """
    if connection.get_execution_options().get("writes", False):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITE_LOCK})")
