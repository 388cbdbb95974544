"""Key pairs in files of their user: of a service, and of who measures."""

import hmac
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Self

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from platformdirs import user_data_path

from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.files import read_bounded
from gemm_tuner.trust.key_id import key_id_of

_MAX_FILE_BYTES = 2**16
_MAC_PURPOSE = b"gemm-tuner mac 1"

KEY_VARIABLE = "GEMM_TUNER_SIGNING_KEY"


def default_key_path() -> Path:
    """Return the file of the signing key in the user's data directory."""
    return user_data_path("gemm-tuner") / "signing-key.pem"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """An Ed25519 key pair."""

    private_key: Ed25519PrivateKey

    @property
    def public_key(self) -> bytes:
        """Return the raw public key, 32 bytes, which clients pin."""
        return self.private_key.public_key().public_bytes_raw()

    @property
    def key_id(self) -> str:
        """Return the name of the public key."""
        return key_id_of(self.public_key)

    @property
    def mac_key(self) -> bytes:
        """Return the key of message authentication codes, 32 bytes, derived from the private key.

        Whoever has it can make what the owner takes for his own, so it stays in memory.
        """
        return hmac.digest(self.private_key.private_bytes_raw(), _MAC_PURPOSE, "sha256")

    @classmethod
    def load_or_create(
        cls,
        path: Path,
        *,
        name: str = "signing key",
        remedy: str = 'name a file in a folder of yours: "gemm-tuner serve --key FILE".',
    ) -> Self:
        """Return the key pair in the PEM file `path`, which is made if it is missing.

        Only its owner can read the file. Processes that start at once get the same key. `name` and
        `remedy` are for messages.

        Raises:
            StoreFailed: the file cannot be read or made.
            InvalidSetting: it is not a private key kept private.
        """
        try:
            if not path.exists():
                _create(path)
            return cls(private_key=_load(path, name))
        except OSError as error:
            raise StoreFailed(
                f"the {name} {path} cannot be read or made ({error.strerror or error}); {remedy}"
            ) from error


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    with NamedTemporaryFile(dir=path.parent) as file:  # made with mode 0600
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        try:
            os.link(file.name, path)
        except FileExistsError:
            return  # another process was first: its key is the key


def _load(path: Path, name: str) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(read_bounded(path, _MAX_FILE_BYTES), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidSetting(
            f"the {name} {path} is not an unencrypted PEM private key ({error}); "
            "restore it, or name another file to have a new one made."
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidSetting(
            f"the {name} {path} is not an Ed25519 key; "
            "restore it, or name another file to have a new one made."
        )
    if path.stat().st_mode & 0o077:
        raise InvalidSetting(
            f"the {name} {path} can be read by other users; "
            f"replace the key if they may have it, and run: chmod 600 {path}"
        )
    return key
