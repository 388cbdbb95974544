"""What a client knows to be revoked: the newest list of a service, kept beside its answers."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from math import inf
from threading import TIMEOUT_MAX, Event, Lock
from time import monotonic, time

from pydantic import ValidationError

from gemm_tuner.client.cache import Cache
from gemm_tuner.client.keys import Keys
from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.errors import KernelRejected, ServiceFailed, SignatureInvalid
from gemm_tuner.machine.forks import tell_of_forks
from gemm_tuner.trust.revocations import RevocationsPayload, open_revocations, signer_of

ASK_EVERY_S = 300.0
ASK_AGAIN_S = 30.0  # after a list that could not be had or believed
MAX_AGE = timedelta(days=7)  # of the list, while the service answers other questions

_LOG = logging.getLogger(__name__)


class KnownRevocations:
    """The newest list of revocations of one service that this user has seen.

    `name` tells services apart in the cache, where processes of this user share what each was
    given. An older list never takes the place of a newer one. Nothing slow is done under the lock.
    """

    def __init__(self, cache: Cache, name: str) -> None:
        self._cache = cache
        self._name = name
        self._lock = Lock()
        self._asked_s = -inf
        self._asking: Event | None = None  # while a thread asks; set when it has
        self._seen = (0.0, 0)  # the file that was read last
        self._list: RevocationsPayload | None = None
        self._artifacts: frozenset[str] = frozenset()
        self._read_kept()
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Make the lock anew; a thread that asks does so in another process."""
        self._lock = Lock()
        self._asking = None

    def is_due(self) -> bool:
        """Return whether it is time to ask for the list again, for this process or another.

        If another has asked, this one takes what was given.
        """
        if self._was_asked_lately():
            return False
        self._read_kept()
        return not self._was_asked_lately()

    def ask(
        self,
        fetch: Callable[[], bytes],
        keys_for: Callable[[str], Keys],
        *,
        longest_wait_s: float = inf,
    ) -> None:
        """Ask for the list with `fetch`, if it is time to, and keep it if it is newer.

        While another thread asks, this one waits for what it is given, at most `longest_wait_s`.

        `keys_for` returns the keys to believe it by, given the id of the one that signed it. A key
        that the known list revokes is not believed: it could take its own revocation back.

        A list that cannot be had or believed costs a warning: the kept one stays.
        """
        if not self.is_due():
            return
        with self._lock:
            if self._was_asked_lately():
                return  # another thread was faster
            others = self._asking
            if others is None:
                own = self._asking = Event()
        if others is not None:
            others.wait(min(longest_wait_s, TIMEOUT_MAX))
            return
        next_s = ASK_AGAIN_S
        try:
            if self._fetch(fetch, keys_for):
                next_s = ASK_EVERY_S
        finally:
            with self._lock:
                self._asked_s = max(self._asked_s, monotonic() - ASK_EVERY_S + next_s)
                if self._asking is own:
                    self._asking = None
            own.set()

    def _fetch(self, fetch: Callable[[], bytes], keys_for: Callable[[str], Keys]) -> bool:
        """Return whether the service told what is revoked, or that it knows of no such list."""
        try:
            document = fetch()
            signer = signer_of(document)
            found = open_revocations(document, keys_for(signer), datetime.now(UTC))
            self._keep(found, signer)
        except ServiceFailed as error:
            # A service from before there were revocations has no such list.
            is_known = self._list is not None or error.status != HTTPStatus.NOT_FOUND
            _LOG.log(logging.WARNING if is_known else logging.DEBUG, "No revocations: %s", error)
            return not is_known
        except KernelRejected as error:
            _LOG.warning("The list of revocations is not believed: %s", error)
            return False
        return True

    def why_revoked(self, digest: str) -> str | None:
        """Return why the artifact with this sha256 must not be loaded, None if it may."""
        if digest not in self._artifacts or self._list is None:
            return None
        return f"kernel {digest[:12]} was revoked (revocations {self._list.number})."

    def why_not_loaded(self, digest: str, *, is_online: bool) -> str | None:
        """Return why an artifact must not be loaded now, None if it may.

        It is revoked, or, while the service answers other questions, the list is too old to know.
        """
        reason = self.why_revoked(digest)
        if reason or self._list is None or not is_online:
            return reason
        if datetime.now(UTC) - self._list.issued_at <= MAX_AGE:
            return None
        return (
            f"the newest list of revocations to be had is of {self._list.issued_at:%Y-%m-%d}, and "
            'something withholds newer ones; if the service has a new database, "gemm-tuner keys '
            'accept" forgets the list.'
        )

    def revoked_keys(self) -> tuple[str, ...]:
        """Return the ids of the signing keys that are revoked."""
        return () if self._list is None else self._list.key_ids

    def check_key(self, key_id: str, url: str) -> None:
        """Check that the key of an answer was not revoked.

        Raises:
            SignatureInvalid: it was.
        """
        if self._list is not None and key_id in self._list.key_ids:
            raise SignatureInvalid(
                f"the answer of {url} is signed with the key {key_id}, which was revoked "
                f"(revocations {self._list.number}); nothing was loaded. If the service has a new "
                f"key, run: gemm-tuner keys accept {url}"
            )

    def now(self) -> datetime:
        """Return the time: that of the newest list, if a clock was turned back behind it."""
        now = datetime.now(UTC)
        return now if self._list is None else max(now, self._list.issued_at)

    def _was_asked_lately(self) -> bool:
        return monotonic() - self._asked_s < ASK_EVERY_S

    def _read_kept(self) -> None:
        """Take the list in the cache, if it is another than was read last."""
        stamp = self._cache.stamp_of_revocations(self._name)
        if stamp != self._seen:
            kept = _read(self._cache.revocations(self._name))
            with self._lock:
                self._take(kept)
                self._seen = (0.0, 0) if kept is None else stamp
        age_s = time() - self._seen[0]
        if 0 <= age_s < ASK_EVERY_S:
            with self._lock:
                self._asked_s = max(self._asked_s, monotonic() - age_s)

    def _take(self, found: RevocationsPayload | None) -> None:
        """Let a list be the known one, if it is newer; the lock is held."""
        if found is not None and (self._list is None or found.age > self._list.age):
            self._artifacts = frozenset(found.artifacts)
            self._list = found

    def _keep(self, found: RevocationsPayload, signer: str) -> None:
        self._read_kept()  # another process may have been faster
        with self._lock:
            if signer in self.revoked_keys():
                raise SignatureInvalid(
                    f"it is signed with the key {signer}, which was revoked; if that was lifted, "
                    '"gemm-tuner keys accept" forgets the list that says so.'
                )
            self._take(found)
            newest = self._list or found
        if newest.number > found.number:
            _LOG.warning(
                "The service sent the revocations %d, older than the %d kept here; they are not "
                "used.",
                found.number,
                newest.number,
            )
        else:
            document = canonical_json(newest.model_dump(mode="json"))
            self._cache.keep_revocations(self._name, document.encode())


def _read(document: bytes | None) -> RevocationsPayload | None:
    """Return a kept list; a damaged one is none."""
    try:
        return RevocationsPayload.model_validate_json(document) if document else None
    except ValidationError:
        return None
