"""Which public keys a client believes: pinned ones, or those remembered of an address."""

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_data_path
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gemm_tuner.build.cache import write_atomically
from gemm_tuner.errors import InvalidSetting, SignatureInvalid, StoreFailed
from gemm_tuner.files import locked, read_bounded
from gemm_tuner.trust.key_id import key_id_of

KEYS_VARIABLE = "GEMM_TUNER_KEYS"

Keys = Mapping[str, bytes]

MAX_SHOWN_KEYS = 64  # by one service, which has one key

_MAX_FILE_BYTES = 2**20
_Remembered = TypeAdapter(dict[str, list[str]])


class _PublicKey(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    public_key: str


class _KeysDocument(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    keys: list[_PublicKey] = Field(max_length=MAX_SHOWN_KEYS)


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
        return parse_keys(read_bounded(Path(name), _MAX_FILE_BYTES))
    except (OSError, SignatureInvalid) as error:
        raise InvalidSetting(
            f"{KEYS_VARIABLE} names {name}, which holds no public keys ({error}); "
            "save there what GET /v1/keys of your service answers."
        ) from None


def parse_keys(document: bytes) -> Keys:
    """Return the keys in an answer to `GET /v1/keys`.

    Raises:
        SignatureInvalid: it is not such an answer, or holds no key or more than `MAX_SHOWN_KEYS`.
    """
    try:
        parsed = _KeysDocument.model_validate_json(document)
        return keys_by_id(b64decode(key.public_key, validate=True) for key in parsed.keys)
    except (ValidationError, ValueError):
        raise SignatureInvalid(
            "the list of public keys is not understood; check the address of the service."
        ) from None


class KnownKeys:
    """The keys that were remembered of each address, in a file that only this user can read.

    Every method raises `InvalidSetting` when the file is damaged or is not this user's alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or user_data_path("gemm-tuner") / "known-keys.json"

    def of(self, url: str) -> Keys | None:
        """Return the keys remembered of the service at `url`."""
        return self._read().get(url)

    def all(self) -> Mapping[str, Keys]:
        """Return the keys remembered of every address."""
        return self._read()

    def remember(self, url: str, keys: Keys) -> Keys:
        """Return the keys of `url`: these from now on, unless others are remembered already.

        Raises:
            StoreFailed: the file cannot be written.
        """
        with self._changing() as known:
            return known.setdefault(url, keys)

    def replace(self, url: str, keys: Keys) -> None:
        """Remember these keys of `url` instead of what was remembered.

        Raises:
            StoreFailed: the file cannot be written.
        """
        with self._changing() as known:
            known[url] = keys

    def forget(self, url: str) -> bool:
        """Forget the keys of `url`, and return whether there were any.

        Raises:
            StoreFailed: the file cannot be written.
        """
        with self._changing() as known:
            return known.pop(url, None) is not None

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Keys]]:
        """Yield the known keys and write them back changed; one process at a time."""
        try:
            with locked(self.path.with_suffix(".lock")):
                known = self._read()
                before = _text_of(known)
                yield known
                after = _text_of(known)
                if after != before:
                    self._write(after)
        except OSError as error:
            raise self._cannot_write(error.strerror) from error

    def _write(self, content: bytes) -> None:
        if len(content) > _MAX_FILE_BYTES:  # it could not be read again
            raise self._cannot_write(f"it would be longer than {_MAX_FILE_BYTES} bytes")
        try:
            write_atomically(self.path, content)
        except StoreFailed as error:
            raise self._cannot_write(str(error.__cause__)) from error

    def _cannot_write(self, reason: object) -> StoreFailed:
        return StoreFailed(
            f"the keys of services cannot be remembered in {self.path} ({reason}); "
            'make its folder writable, forget addresses ("gemm-tuner keys forget"), or pin keys by '
            f"{KEYS_VARIABLE}."
        )

    def _read(self) -> dict[str, Keys]:
        try:
            content = read_bounded(self.path, _MAX_FILE_BYTES, is_private=True)
            remembered = _Remembered.validate_json(content)
            return {
                url: keys_by_id(b64decode(key, validate=True) for key in keys)
                for url, keys in remembered.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise InvalidSetting(
                f"{self.path}, which remembers the keys of services, cannot be believed ({error}); "
                "correct it, or delete it to have the next keys remembered."
            ) from None


def _text_of(known: Mapping[str, Keys]) -> bytes:
    document = {
        url: [b64encode(key).decode() for key in keys.values()] for url, keys in known.items()
    }
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"
