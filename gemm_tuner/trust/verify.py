"""Verification of signed verdicts: the signature first, then the content."""

import binascii
from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ValidationError

from gemm_tuner.errors import SignatureInvalid, VerdictExpired
from gemm_tuner.trust.payload import VerdictPayload
from gemm_tuner.trust.sign import PURPOSE, SignedVerdict


def open_verdict(
    envelope: SignedVerdict, pinned_keys: Mapping[str, bytes], now: datetime
) -> VerdictPayload:
    """Return the payload of `envelope`, if it was signed with a pinned key and still holds.

    `pinned_keys` maps the id of each key to its 32 raw bytes.

    Raises:
        SignatureInvalid: the key is not pinned, or the signature or the payload is not valid.
        VerdictExpired: the verdict held until before `now`.
    """
    payload = _verified_bytes(envelope, pinned_keys)
    try:
        verdict = VerdictPayload.model_validate_json(payload)
    except ValidationError as error:
        raise SignatureInvalid(
            f"the signed verdict does not have the known form ({error.error_count()} faults); "
            "update gemm-tuner."
        ) from None
    if now >= verdict.expires_at:
        raise VerdictExpired(
            f"the verdict for {verdict.problem!r} held until {verdict.expires_at.isoformat()}; "
            "ask the service again, and check this machine's clock."
        )
    return verdict


def _verified_bytes(envelope: SignedVerdict, pinned_keys: Mapping[str, bytes]) -> bytes:
    public_key = pinned_keys.get(envelope.key_id)
    if public_key is None:
        raise SignatureInvalid(
            f"the verdict is signed with the key {envelope.key_id}, which is not pinned; "
            "nothing was loaded: pin the service's key if you trust it."
        )
    try:
        payload = b64decode(envelope.payload, validate=True)
        signature = b64decode(envelope.signature, validate=True)
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, PURPOSE + payload)
    except (binascii.Error, ValueError, InvalidSignature):
        raise SignatureInvalid(
            f"the signature of the verdict is not by the key {envelope.key_id}; "
            "nothing was loaded: the answer was changed on its way."
        ) from None
    return payload
