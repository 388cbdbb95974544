"""Signatures of a service, checked by a client before it reads the content."""

import binascii
from base64 import b64decode, b64encode
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemm_tuner.errors import SignatureInvalid, VerdictExpired
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.payload import VerdictPayload

# A signature made for another purpose with the same key is not one of a verdict.
PURPOSE = b"gemm-tuner verdict 1\n"
MAX_LIFETIME = timedelta(days=31)
MAX_CLOCK_ERROR = timedelta(minutes=10)


class Envelope(BaseModel):
    """The exact bytes that were signed, and the signature, both in base64.

    The signature is Ed25519 over a line that says what for, and the bytes of the payload.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    payload: str = Field(max_length=1_000_000)
    signature: str = Field(max_length=100)
    key_id: str = Field(pattern=r"^[0-9a-f]{16}$")


class SignedVerdict(Envelope):
    """The envelope of a verdict. Its line is `gemm-tuner verdict 1`."""

    payload: str = Field(max_length=100_000)


AnyEnvelope = TypeVar("AnyEnvelope", bound=Envelope)


def sign_verdict(payload: bytes, key_pair: KeyPair) -> SignedVerdict:
    """Return `payload` with its signature."""
    return sign_as(SignedVerdict, PURPOSE, payload, key_pair)


def sign_as(
    kind: type[AnyEnvelope], purpose: bytes, payload: bytes, key_pair: KeyPair
) -> AnyEnvelope:
    """Return an envelope of a kind: `payload` with its signature for `purpose`."""
    return kind(
        payload=b64encode(payload).decode(),
        signature=b64encode(key_pair.private_key.sign(purpose + payload)).decode(),
        key_id=key_pair.key_id,
    )


def envelope_json(purpose: bytes, payload: bytes, key_pair: KeyPair, key_id: str) -> bytes:
    """Return the JSON of an envelope as of `sign_as`, without making a model of it."""
    signature = key_pair.private_key.sign(purpose + payload)
    return b'{"payload":"%b","signature":"%b","key_id":"%b"}' % (
        b64encode(payload),
        b64encode(signature),
        key_id.encode(),
    )


def open_verdict(
    envelope: SignedVerdict, pinned_keys: Mapping[str, bytes], now: datetime
) -> VerdictPayload:
    """Return the payload of `envelope`, if it was signed with a pinned key and still holds.

    `pinned_keys` maps the id of each key to its 32 raw bytes.

    Raises:
        SignatureInvalid: the key is not pinned, the signature or the payload is not valid, or the
            verdict would hold longer than `MAX_LIFETIME`.
        VerdictExpired: the verdict held until before `now`, or does not hold yet.
    """
    payload = verified_bytes(envelope, pinned_keys, PURPOSE, "verdict")
    try:
        verdict = VerdictPayload.model_validate_json(payload)
    except ValidationError as error:
        raise SignatureInvalid(
            f"the signed verdict does not have the known form ({error.error_count()} faults); "
            "update gemm-tuner."
        ) from None
    if verdict.expires_at - verdict.issued_at > MAX_LIFETIME:
        raise SignatureInvalid(
            f"the verdict for {verdict.problem!r} holds from {verdict.issued_at.isoformat()} until "
            f"{verdict.expires_at.isoformat()}, more than {MAX_LIFETIME.days} days; "
            "nothing was loaded: check the service."
        )
    if verdict.issued_at > now + MAX_CLOCK_ERROR:
        raise VerdictExpired(
            f"the verdict for {verdict.problem!r} holds only from {verdict.issued_at.isoformat()}; "
            "check the clocks of this machine and of the service."
        )
    if now >= verdict.expires_at:
        raise VerdictExpired(
            f"the verdict for {verdict.problem!r} held until {verdict.expires_at.isoformat()}; "
            "ask the service again, and check this machine's clock."
        )
    return verdict


def verified_bytes(
    envelope: Envelope, pinned_keys: Mapping[str, bytes], purpose: bytes, name: str
) -> bytes:
    """Return the payload of `envelope`, if a pinned key signed it for `purpose`.

    Raises:
        SignatureInvalid: it was not; the message calls it by `name`.
    """
    public_key = pinned_keys.get(envelope.key_id)
    if public_key is None:
        raise SignatureInvalid(
            f"the {name} is signed with the key {envelope.key_id}, which is not pinned; "
            "nothing was loaded: pin the service's key if you trust it."
        )
    try:
        payload = b64decode(envelope.payload, validate=True)
        signature = b64decode(envelope.signature, validate=True)
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, purpose + payload)
    except (binascii.Error, ValueError, InvalidSignature):
        raise SignatureInvalid(
            f"the signature of the {name} is not by the key {envelope.key_id}; "
            "nothing was loaded: the answer was changed on its way."
        ) from None
    return payload
