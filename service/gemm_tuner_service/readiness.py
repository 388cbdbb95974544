"""Whether a service can do its work: its database, its schema, and what is in it."""

import logging
import secrets
import time
from collections.abc import Callable
from threading import Lock

from sqlalchemy import Engine

from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import is_current

KNOWN_S = 5.0

_LOGGER = logging.getLogger(__name__)


class Readiness:
    """Looks at the database at most every `KNOWN_S`, and each time at another artifact.

    One that is damaged is looked at again until it is replaced.
    """

    def __init__(
        self, engine: Engine, repository: Repository, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._repository = repository
        self._now_s = now_s
        self._lock = Lock()
        self._fault: str | None = None
        self._until_s = float("-inf")
        self._damaged: str | None = None

    def fault(self) -> str | None:
        """Return what is wrong, None if the service is ready."""
        with self._lock:
            if self._now_s() >= self._until_s:
                self._fault = self._look()
                self._until_s = self._now_s() + KNOWN_S
            return self._fault

    def _look(self) -> str | None:
        if not is_current(self._engine):
            return "the database does not answer, or has another schema"
        digest = None
        try:
            digest = self._damaged or self._repository.artifact_from(secrets.token_hex(32))
            if digest is not None:
                self._repository.binary(digest)
        except StoreFailed as error:
            self._damaged = digest
            _LOGGER.warning("not ready: %s", error)
            return "an artifact cannot be read, or is damaged; the log has the cause"
        self._damaged = None
        return None
