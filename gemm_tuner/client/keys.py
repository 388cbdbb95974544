"""Which public keys a client believes: pinned ones, or those of a service on this machine."""

import os
from base64 import b64decode
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from gemm_tuner.errors import InvalidSetting, SignatureInvalid
from gemm_tuner.trust.keys import key_id_of

KEYS_VARIABLE = "GEMM_TUNER_KEYS"

Keys = Mapping[str, bytes]


class _PublicKey(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    public_key: str


class _KeysDocument(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    keys: list[_PublicKey]


def keys_by_id(public_keys: Iterable[bytes]) -> Keys:
    """Return raw public keys by their ids.

    Raises:
        InvalidSetting: one is not 32 bytes, or there is none.
    """
    keys = {key_id_of(key): key for key in public_keys}
    if not keys:
        raise InvalidSetting("no public key is given, so no answer could be believed; give one.")
    for key_id, key in keys.items():
        if len(key) != 32:
            raise InvalidSetting(
                f"public key {key_id} has {len(key)} bytes; an Ed25519 key has 32: "
                "give the raw key."
            )
    return keys


def configured_keys() -> Keys | None:
    """Return the keys in the file that `GEMM_TUNER_KEYS` names, None if it names none.

    The file holds what `GET /v1/keys` answered.

    Raises:
        InvalidSetting: the file cannot be read, or holds no keys.
    """
    name = os.environ.get(KEYS_VARIABLE)
    if not name:
        return None
    try:
        return parse_keys(Path(name).read_bytes())
    except (OSError, SignatureInvalid) as error:
        raise InvalidSetting(
            f"{KEYS_VARIABLE} names {name}, which holds no public keys ({error}); "
            "save there what GET /v1/keys of your service answers."
        ) from None


def parse_keys(document: bytes) -> Keys:
    """Return the keys in an answer to `GET /v1/keys`.

    Raises:
        SignatureInvalid: it is not such an answer, or holds no key.
    """
    try:
        parsed = _KeysDocument.model_validate_json(document)
        return keys_by_id(b64decode(key.public_key, validate=True) for key in parsed.keys)
    except (ValidationError, ValueError):
        raise SignatureInvalid(
            "the list of public keys is not understood; check the address of the service."
        ) from None
