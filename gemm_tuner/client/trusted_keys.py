"""The keys by which a client believes one service: pinned, remembered, or signed over by those."""

import logging
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemm_tuner.client.keys import KEYS_VARIABLE, Keys, KnownKeys, parse_keys
from gemm_tuner.client.revocations import KnownRevocations
from gemm_tuner.client.transport import Address, Session
from gemm_tuner.errors import SignatureInvalid, StoreFailed
from gemm_tuner.trust.succession import MAX_SUCCESSIONS, Succession, successors

_LOG = logging.getLogger(__name__)


class _SuccessionsDocument(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    successions: list[Succession] = Field(default=[], max_length=MAX_SUCCESSIONS)


class BelievedKeys:
    """The keys of the service at one address; without `pinned` ones, those that are remembered."""

    def __init__(
        self, address: Address, pinned: Keys | None, revocations: KnownRevocations
    ) -> None:
        self._address = address
        self._pinned = pinned
        self._revocations = revocations
        self._known_keys = KnownKeys()

    def kept(self) -> Keys:
        """Return the keys that are pinned or remembered, none before the first contact."""
        if self._pinned is not None:
            return self._pinned
        return self._known_keys.of(self._address.url) or {}

    def at_first(self, session: Session) -> Keys:
        """Return the keys to believe; those of a service on this machine are remembered at first.

        Raises:
            SignatureInvalid: none is known of a service elsewhere.
            StoreFailed: a key of a port, which anyone here can hold, cannot be remembered.
        """
        known = self.kept()
        if known:
            return known
        if not self._address.is_local:
            raise SignatureInvalid(
                f"no public key of {self._address.url} is known, so its answers cannot be "
                f"checked; run: gemm-tuner keys accept {self._address.url}, and compare the key id "
                f"with the service's, or name a file of its keys in {KEYS_VARIABLE}."
            )
        shown = parse_keys(session.keys())
        try:
            return self._known_keys.remember(self._address.url, shown)
        except StoreFailed as error:
            if self._address.socket is None:
                raise
            # The peer's uid is this user's: the key need not be remembered to be believed.
            _LOG.warning("%s", error)
            return shown

    def of_signers(self, session: Session, keys: Keys, key_ids: Iterable[str]) -> Keys:
        """Return the keys to believe an answer by that is signed with `key_ids`.

        If these are not among `keys`, but those signed them over, they are believed from now on.
        Otherwise it is `keys`, and the answer is refused by them.
        """
        signers = set(key_ids)
        if signers <= set(keys):
            return keys
        try:
            shown = _SuccessionsDocument.model_validate_json(session.keys()).successions
        except ValidationError:
            return keys
        found = successors(keys, shown, self._revocations.revoked_keys())
        if not signers <= {*keys, *found}:
            return keys
        new = {key_id: {**keys, **found}[key_id] for key_id in signers}
        _LOG.warning(
            "The service at %s signs with the key %s now, which %s signed over.",
            self._address.url,
            ", ".join(new),
            ", ".join(keys),
        )
        if self._pinned is not None:
            self._pinned = {**self._pinned, **new}
            return self._pinned
        try:
            self._known_keys.replace(self._address.url, new)
        except StoreFailed as error:
            _LOG.warning("%s", error)
            self._pinned = new  # for as long as this process lasts
        return new

    def check(self, key_id: str, keys: Keys) -> None:
        """Check that an answer is signed with a key to be believed.

        Raises:
            SignatureInvalid: another key was remembered of this address, or the key was revoked.
        """
        if self._pinned is None and keys and key_id not in keys:
            raise SignatureInvalid(
                f"the answer of {self._address.url} is signed with the key {key_id}, but "
                f"{', '.join(keys)} was remembered of it: someone else may answer there, and "
                "nothing was loaded. If the service was given a new key, run: "
                f"gemm-tuner keys accept {self._address.url} {key_id}"
            )
        self._revocations.check_key(key_id, self._address.url)
