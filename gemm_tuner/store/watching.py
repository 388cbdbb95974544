"""Noticing that verdicts changed, without a query where the database can tell."""

import time
from threading import Lock

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import is_read_only

LOOK_EVERY_S = 0.1  # on a server: that old may be what is taken for new


class ChangeWatch:
    """Tells whether the verdicts of a database are still those of an earlier look.

    SQLite counts what others commit for each open connection (`PRAGMA data_version`), so a change
    is seen at once. On a server the counter of changes is read, at most every `LOOK_EVERY_S`.
    """

    def __init__(self, engine: Engine, repository: Repository) -> None:
        self._engine = engine
        self._repository = repository
        self._lock = Lock()
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._is_blind = is_read_only(engine)  # its file may be replaced
        self._kept = engine.raw_connection() if self._is_sqlite and not self._is_blind else None
        self._known_at: float | None = None  # by _clock, when the changes were read
        self._changes: int | None = None

    def state(self) -> tuple[object, ...] | None:
        """Return what stays the same while verdicts do, and keys are believed; None if unknown.

        Raises:
            StoreFailed: the database does not answer.
        """
        if self._is_blind:
            return None
        with self._lock:
            now = self._clock()  # before the query: what changes meanwhile shows later
            if not self._is_known(now):
                self._changes = self._repository.changes()
                self._known_at = now
        return self._changes, self._repository.believed_keys()

    def state_at_once(self) -> tuple[object, ...] | None:
        """Return the state if it can be told without a query, and None if not."""
        if self._is_blind or not self._lock.acquire(blocking=False):
            return None
        try:
            if not self._is_known(self._clock()):
                return None
        finally:
            self._lock.release()
        return self._changes, self._repository.believed_keys()

    def close(self) -> None:
        """Give the kept connection back."""
        if self._kept is not None:
            self._kept.close()

    def _is_known(self, now: float) -> bool:
        if self._known_at is None:
            return False
        if self._kept is not None:
            return now == self._known_at
        return now - self._known_at < LOOK_EVERY_S

    def _clock(self) -> float:
        """Return the number of changes that the kept connection saw, or else the time."""
        if self._kept is None:
            return time.monotonic()
        try:
            cursor = self._kept.cursor()
            cursor.execute("PRAGMA data_version")
            row = cursor.fetchone()
            cursor.close()
        except (SQLAlchemyError, self._engine.dialect.dbapi.Error) as error:  # type: ignore[union-attr]  # an engine has a driver
            raise StoreFailed(f"the database does not answer: {error}; check its disk.") from error
        assert row is not None
        return float(row[0])
