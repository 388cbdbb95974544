"""Successions of signing keys: the key that leaves signs the one that comes.

A client that believes a key believes its successors, unless one of the keys between was revoked.
"""

import binascii
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.trust.files import write_privately
from gemm_tuner.trust.key_id import key_id_of
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.ownership import check_owned

PURPOSE = b"gemm-tuner succession 1\n"
MAX_SUCCESSIONS = 32  # that are kept; the oldest leave

_MAX_FILE_BYTES = 2**16


class Succession(BaseModel):
    """A signing key and its successor, raw and in base64, and the signature by the first.

    It is Ed25519 over the line `gemm-tuner succession 1` and the two raw keys.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    predecessor: str = Field(max_length=100)
    successor: str = Field(max_length=100)
    signature: str = Field(max_length=100)


_Successions = TypeAdapter(list[Succession])


def succession_path(key_path: Path) -> Path:
    """Return the file of the successions that lead to the signing key in `key_path`."""
    return key_path.with_name(f"{key_path.name}.successions.json")


def read_successions(key_path: Path) -> tuple[Succession, ...]:
    """Return the successions that led to a signing key, the oldest first.

    Raises:
        InvalidSetting: the file is damaged, or others can change it.
        StoreFailed: it cannot be read.
    """
    path = succession_path(key_path)
    earlier = key_path.with_suffix(".successions.json")  # which keys of one stem shared
    if not path.exists() and earlier.exists():
        path = earlier
    check_owned(path)
    try:
        with path.open("rb") as file:
            return tuple(_Successions.validate_json(file.read(_MAX_FILE_BYTES)))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise StoreFailed(f"{path} cannot be read ({error.strerror}); correct its mode.") from error
    except ValidationError:
        raise InvalidSetting(
            f"{path}, by which clients go from a key to the next, is damaged; restore or delete "
            "it: clients of an old key then have to accept the new one."
        ) from None


def present_key(key_path: Path) -> KeyPair:
    """Return the signing key in `key_path`, which must be there.

    Raises:
        InvalidSetting: there is none, it is damaged, or others can change it.
        StoreFailed: it cannot be read.
    """
    if not key_path.exists():
        raise InvalidSetting(
            f'there is no signing key {key_path}; "gemm-tuner serve" makes one at its first start.'
        )
    check_owned(key_path)
    return KeyPair.load_or_create(key_path)


def rotate(key_path: Path, *, is_compromised: bool) -> tuple[KeyPair, KeyPair]:
    """Put a new signing key in the place of the one in `key_path`; return the old one and the new.

    The old one signs the new one over, unless it `is_compromised`: whoever has it could as well.
    It is gone afterwards.

    Raises:
        StoreFailed: the key cannot be read, or not be written.
        InvalidSetting: a file is damaged, or others can change it.
    """
    old = present_key(key_path)
    new = KeyPair(private_key=Ed25519PrivateKey.generate())
    before = () if is_compromised else (*read_successions(key_path), _sign_over(old, new))
    kept = list(before[-MAX_SUCCESSIONS:])
    try:
        # First what leads to the new key: stopped in between, the old one is still the key.
        write_privately(succession_path(key_path), _Successions.dump_json(kept))
        write_privately(
            key_path,
            new.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )
    except OSError as error:
        raise StoreFailed(
            f"the signing key {key_path} cannot be replaced ({error.strerror}); make its folder "
            "writable, or free some space. The old key is the key still."
        ) from error
    return old, new


def successors(
    known: Mapping[str, bytes], successions: Iterable[Succession], revoked: Collection[str]
) -> dict[str, bytes]:
    """Return the keys that succeed those `known`, by their ids, over any number of successions.

    What is not signed by its predecessor leads nowhere, nor does a key whose id is `revoked`.
    """
    found: dict[str, bytes] = {}
    left = list(successions)[:MAX_SUCCESSIONS]
    while True:
        believed = {**known, **found}
        steps = [
            key
            for each in left
            if (key := _verified(each, believed, revoked)) and key_id_of(key) not in believed
        ]
        if not steps:
            return found
        found.update({key_id_of(key): key for key in steps})


def unrevoked(
    successions: Iterable[Succession], revoked: Collection[str]
) -> tuple[Succession, ...]:
    """Return those of `successions` neither key of which is revoked."""
    return tuple(
        each
        for each in successions
        if not {_id_of(each.predecessor), _id_of(each.successor)} & set(revoked)
    )


def _id_of(key: str) -> str:
    return key_id_of(b64decode(key))


def _sign_over(old: KeyPair, new: KeyPair) -> Succession:
    return Succession(
        predecessor=b64encode(old.public_key).decode(),
        successor=b64encode(new.public_key).decode(),
        signature=b64encode(
            old.private_key.sign(PURPOSE + old.public_key + new.public_key)
        ).decode(),
    )


def _verified(
    succession: Succession, believed: Mapping[str, bytes], revoked: Collection[str]
) -> bytes | None:
    """Return the successor, if a believed key signed it and none of the two is revoked."""
    try:
        old = b64decode(succession.predecessor, validate=True)
        new = b64decode(succession.successor, validate=True)
        old_id, new_id = key_id_of(old), key_id_of(new)
        if believed.get(old_id) != old or {old_id, new_id} & set(revoked) or len(new) != 32:
            return None
        signature = b64decode(succession.signature, validate=True)
        Ed25519PublicKey.from_public_bytes(old).verify(signature, PURPOSE + old + new)
    except (binascii.Error, ValueError, InvalidSignature):
        return None
    return new
