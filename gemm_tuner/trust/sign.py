"""Signing of verdicts."""

from base64 import b64encode

from pydantic import BaseModel, ConfigDict, Field

from gemm_tuner.trust.keys import KeyPair

# A signature made for another purpose with the same key is not one of a verdict.
PURPOSE = b"gemm-tuner verdict 1\n"


class SignedVerdict(BaseModel):
    """The envelope: the exact bytes that were signed, and the signature, both in base64.

    The signature is Ed25519 over the line `gemm-tuner verdict 1` and the bytes of the payload.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    payload: str = Field(max_length=100_000)
    signature: str = Field(max_length=100)
    key_id: str = Field(pattern=r"^[0-9a-f]{16}$")


def sign_verdict(payload: bytes, key_pair: KeyPair) -> SignedVerdict:
    """Return `payload` with its signature."""
    return SignedVerdict(
        payload=b64encode(payload).decode(),
        signature=b64encode(key_pair.private_key.sign(PURPOSE + payload)).decode(),
        key_id=key_pair.key_id,
    )
