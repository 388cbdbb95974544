"""Attestations: whoever measures signs what was measured, so that a database need not be trusted.

Each user of a machine has a measuring key. A store serves what is attested with a key that its
reader believes: the own one, and those of others that were accepted.
"""

import hmac
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from platformdirs import user_data_path

from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.files import locked
from gemm_tuner.trust.files import write_privately
from gemm_tuner.trust.key_id import key_id_of
from gemm_tuner.trust.ownership import check_owned

if TYPE_CHECKING:
    from gemm_tuner.trust.keys import KeyPair

SIGNATURE_BYTES = 64
MAC_BYTES = 32
_KNOWN_SIGNATURES = 2**16
_PUBLIC_KEY = re.compile(r"[0-9a-f]{64}")
_MAX_FILE_BYTES = 2**16


class Statement(StrEnum):
    """The kinds of document that are attested; an attestation of one kind is none of another."""

    TRIAL = "trial"
    ARTIFACT = "artifact"
    VERDICT = "verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """A signature under a document, and the raw public key in hex that it is made with.

    `mac` is a message authentication code that only who signed can check, in a fiftieth of the
    time; it is empty where there is none.
    """

    public_key: str
    signature: bytes
    mac: bytes = b""

    @property
    def key_id(self) -> str:
        """Return the name of the key."""
        return key_id_of(bytes.fromhex(self.public_key))


class MeasuringKeys:
    """The measuring key of this user, made at first need, and the keys of others to believe.

    Both are files in `folder`, by default the user's data directory. Changes of the files are seen
    at the next question.
    """

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or user_data_path("gemm-tuner")
        self.own_path = folder / "measuring-key.pem"
        self.accepted_path = folder / "measuring-keys.txt"
        self._own: KeyPair | None = None
        self._own_state: tuple[int, ...] | None = None
        self._state: tuple[object, ...] | None = None
        self._believed: frozenset[str] = frozenset()
        self._mac_keys: dict[str, bytes] = {}  # that of the own public key, if there is one

    def attest(self, statement: Statement, document: str) -> Attestation:
        """Return this user's attestation of a document.

        Raises:
            StoreFailed: the measuring key cannot be read or made.
            InvalidSetting: its file holds no private key, or others can read it.
        """
        own, message = self._pair(), _message(statement, document)
        return Attestation(
            public_key=own.public_key.hex(),
            signature=own.private_key.sign(message),
            # Of what is looked up for each question, and read by who wrote it as a rule.
            mac=_mac(own.mac_key, message) if statement is Statement.VERDICT else b"",
        )

    def own_made(self) -> str:
        """Return the public key of this user in hex, made if there is none.

        Raises:
            StoreFailed: the measuring key cannot be read or made.
            InvalidSetting: its file holds no private key, or others can read it.
        """
        return self._pair().public_key.hex()

    def _pair(self) -> "KeyPair":
        """Return the key pair of this user, made if there is none."""
        from gemm_tuner.trust.keys import KeyPair  # noqa: PLC0415 - as in _is_valid

        if self._own is None or self._own_state != _state_of(self.own_path):
            self._own = KeyPair.load_or_create(
                self.own_path,
                name="measuring key",
                remedy="make the folder writable, or name another by XDG_DATA_HOME.",
            )
            self._own_state = _state_of(self.own_path)
        return self._own

    def seal(self, about: bytes, content: bytes) -> bytes:
        """Return `content` behind a code that only this user can make, of it and what it is about.

        Raises:
            StoreFailed: the measuring key cannot be read or made.
            InvalidSetting: its file holds no private key, or others can read it.
        """
        return _mac(self._pair().mac_key, _sealed_message(about, content)) + content

    def sealing_key(self) -> str | None:
        """Return the public key, in hex, of the user whose seals can be checked; None before any.

        Raises:
            InvalidSetting: a file of keys can be changed by others, or is damaged.
            StoreFailed: it cannot be read.
        """
        self.believed()
        return next(iter(self._mac_keys), None)

    def unsealed(self, sealed: Iterable[tuple[bytes, bytes | None]]) -> list[bytes | None]:
        """Return each content that this user sealed; each comes after what it is to be about.

        It is None where there is nothing, another sealed it, or it was changed.

        Raises:
            InvalidSetting: a file of keys can be changed by others, or is damaged.
            StoreFailed: it cannot be read.
        """
        self.believed()
        key = next(iter(self._mac_keys.values()), None)
        return [
            None if key is None or content is None else _unsealed(key, about, content)
            for about, content in sealed
        ]

    def why_not_believed(
        self, statement: Statement, document: str, attestation: Attestation | None
    ) -> str | None:
        """Return why an attestation is no reason to serve what a document says; None if it is.

        Raises:
            InvalidSetting: a file of keys can be changed by others, or is damaged.
            StoreFailed: it cannot be read.
        """
        if attestation is None or not _PUBLIC_KEY.fullmatch(attestation.public_key):
            return 'no one attests it; if you trust it, run "gemm-tuner records attest"'
        if attestation.public_key not in self.believed():
            return (
                f"it is attested with the key {attestation.key_id}, which is not believed here; if "
                f'you trust who measured it, run "gemm-tuner keys accept {attestation.public_key}"'
            )
        if not self._is_of(attestation, statement, document):
            return (
                f"the attestation with the key {attestation.key_id} is not of these bytes: the "
                'database was changed; run "gemm-tuner sweep" to measure anew'
            )
        return None

    def believed(self) -> frozenset[str]:
        """Return the public keys that are believed, in hex: the own one, if there is one, too.

        Raises:
            InvalidSetting: a file of keys can be changed by others, or is damaged.
            StoreFailed: it cannot be read.
        """
        state = (_state_of(self.own_path), _state_of(self.accepted_path))
        if state != self._state:
            own = self._own_pair()
            mac_keys = {own.public_key.hex(): own.mac_key} if own else {}
            self._believed = self.accepted() | mac_keys.keys()
            self._mac_keys = mac_keys
            self._state = state
        return self._believed

    def own(self) -> str | None:
        """Return the public key of this user in hex; None before anything was attested.

        Raises:
            InvalidSetting: its file holds no private key, or others can read or change it.
            StoreFailed: it cannot be read.
        """
        own = self._own_pair()
        return None if own is None else own.public_key.hex()

    def _own_pair(self) -> "KeyPair | None":
        from gemm_tuner.trust.keys import KeyPair  # noqa: PLC0415 - as in _is_valid

        if not self.own_path.exists():
            return None
        check_owned(self.own_path)
        return KeyPair.load_or_create(self.own_path, name="measuring key")

    def _is_of(self, attestation: Attestation, statement: Statement, document: str) -> bool:
        message = _message(statement, document)
        if attestation.mac:
            if statement is not Statement.VERDICT:
                return False  # nothing else has one
            key = self._mac_keys.get(attestation.public_key)
            if key is not None and hmac.compare_digest(attestation.mac, _mac(key, message)):
                return True
        return _is_valid(attestation.public_key, attestation.signature, message)

    def accepted(self) -> frozenset[str]:
        """Return the public keys of others that are believed, in hex.

        Raises:
            InvalidSetting: others can change the file, or a line of it is no key.
            StoreFailed: it cannot be read.
        """
        check_owned(self.accepted_path)
        try:
            with self.accepted_path.open("rb") as file:
                lines = file.read(_MAX_FILE_BYTES).decode(errors="replace").split()
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise StoreFailed(
                f"{self.accepted_path} cannot be read ({error.strerror}); correct its mode."
            ) from error
        for line in lines:
            check_public_key(line, f"{self.accepted_path} holds")
        return frozenset(lines)

    def accept(self, public_key: str) -> None:
        """Believe from now on what is attested with a key.

        Raises:
            InvalidSetting: it is no public key in hex.
            StoreFailed: this cannot be written.
        """
        check_public_key(public_key, "you named")
        with self._changing() as keys:
            keys.add(public_key)

    def forget(self, public_key: str) -> bool:
        """Believe a key no longer, and return whether it was believed.

        Raises:
            InvalidSetting: it is no public key in hex.
            StoreFailed: this cannot be written.
        """
        check_public_key(public_key, "you named")
        with self._changing() as keys:
            was_there = public_key in keys
            keys.discard(public_key)
        return was_there

    @contextmanager
    def _changing(self) -> Iterator[set[str]]:
        """Yield the accepted keys, and write them back; one process at a time."""
        try:
            with locked(self.accepted_path.with_suffix(".lock")):
                keys = set(self.accepted())
                yield keys
                write_privately(
                    self.accepted_path, "".join(f"{k}\n" for k in sorted(keys)).encode()
                )
        except OSError as error:
            raise StoreFailed(
                f"{self.accepted_path} cannot be written ({error.strerror}); "
                "make its folder writable."
            ) from error


def check_public_key(text: str, where: str) -> None:
    """Check that `text` is a raw Ed25519 public key in hex; `where` begins the message.

    Raises:
        InvalidSetting: it is not.
    """
    if not _PUBLIC_KEY.fullmatch(text):
        raise InvalidSetting(
            f'{where} {text[:80]!r}, which is no measuring key of 64 hex digits; "gemm-tuner keys '
            'measuring" prints that of its user.'
        )


def _message(statement: Statement, document: str) -> bytes:
    # The sha256 stands for the document; the prefix keeps a signature from meaning anything else.
    digest = sha256(document.encode()).hexdigest()
    return f"gemm-tuner {statement.value} 1\n{digest}".encode()


def _sealed_message(about: bytes, content: bytes) -> bytes:
    return b"gemm-tuner sealed 1\n%d %b\n%b" % (len(about), about, content)


def _unsealed(key: bytes, about: bytes, sealed: bytes) -> bytes | None:
    code, content = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
    is_it = hmac.compare_digest(code, _mac(key, _sealed_message(about, content)))
    return content if is_it else None


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


@lru_cache(maxsize=_KNOWN_SIGNATURES)
def _is_valid(public_key: str, signature: bytes, message: bytes) -> bool:
    # Not loaded where there is nothing to check: it is half of what a question takes.
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey  # noqa: PLC0415

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _state_of(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)
