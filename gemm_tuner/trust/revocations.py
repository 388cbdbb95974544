"""The signed list of what a service has revoked."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated

from pydantic import AwareDatetime, Field, ValidationError

from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.domain.revocation import MAX_REVOCATIONS, Revocations
from gemm_tuner.errors import SignatureInvalid, VerdictExpired
from gemm_tuner.strict_model import Sha256, StrictModel
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.signature import MAX_CLOCK_ERROR, Envelope, sign_as, verified_bytes

PURPOSE = b"gemm-tuner revocations 1\n"

KeyId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class SignedRevocations(Envelope):
    """The envelope of a list of revocations. Its line is `gemm-tuner revocations 1`."""


class RevocationsPayload(StrictModel):
    """A list of revocations as it is signed: artifacts by sha256, signing keys by id.

    It is whole. Of two lists of one service, the one with the smaller number, or of one number with
    the earlier time of issue, is the older.
    """

    number: Annotated[int, Field(ge=0)]
    issued_at: AwareDatetime
    artifacts: Annotated[tuple[Sha256, ...], Field(max_length=MAX_REVOCATIONS)]
    key_ids: Annotated[tuple[KeyId, ...], Field(max_length=MAX_REVOCATIONS)]

    @property
    def age(self) -> tuple[int, datetime]:
        """Return the age as a key: an older list has a smaller one."""
        return (self.number, self.issued_at)


def sign_revocations(
    revocations: Revocations, key_pair: KeyPair, *, issued_at: datetime
) -> SignedRevocations:
    """Return the signed form of what is revoked."""
    payload = RevocationsPayload(
        number=revocations.number,
        issued_at=issued_at,
        artifacts=revocations.artifacts,
        key_ids=revocations.key_ids,
    )
    content = canonical_json(payload.model_dump(mode="json")).encode()
    return sign_as(SignedRevocations, PURPOSE, content, key_pair)


def signer_of(document: bytes) -> str:
    """Return the id of the key that an answer to `GET /v1/revocations` says it is signed with.

    Raises:
        SignatureInvalid: it is not such an answer.
    """
    return _envelope_of(document).key_id


def open_revocations(
    document: bytes, pinned_keys: Mapping[str, bytes], now: datetime
) -> RevocationsPayload:
    """Return the list in an answer to `GET /v1/revocations`, if a pinned key signed it.

    Raises:
        SignatureInvalid: it is not such an answer, or not signed with a pinned key.
        VerdictExpired: it was issued in the future.
    """
    content = verified_bytes(_envelope_of(document), pinned_keys, PURPOSE, "list of revocations")
    try:
        payload = RevocationsPayload.model_validate_json(content)
    except ValidationError as error:
        raise _unknown_form(error) from None
    if payload.issued_at > now + MAX_CLOCK_ERROR:
        raise VerdictExpired(
            f"the list of revocations is of {payload.issued_at.isoformat()}, in the future; "
            "check the clocks of this machine and of the service."
        )
    return payload


def _envelope_of(document: bytes) -> SignedRevocations:
    try:
        return SignedRevocations.model_validate_json(document)
    except ValidationError as error:
        raise _unknown_form(error) from None


def _unknown_form(error: ValidationError) -> SignatureInvalid:
    return SignatureInvalid(
        f"the list of revocations does not have the known form ({error.error_count()} faults); "
        "check the address of the service, or update gemm-tuner."
    )
