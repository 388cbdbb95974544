"""The name of a public key."""

from functools import lru_cache
from hashlib import sha256

KEY_ID_LENGTH = 16


@lru_cache(maxsize=1024)
def key_id_of(public_key: bytes) -> str:
    """Return the name of a raw public key: the start of its hex sha256."""
    return sha256(public_key).hexdigest()[:KEY_ID_LENGTH]
