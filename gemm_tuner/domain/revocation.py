"""Revocations: what was signed and must not be believed any more."""

import re
from dataclasses import dataclass

from gemm_tuner.errors import InvalidSetting

MAX_REVOCATIONS = 8000  # in a list; the oldest leave it
MAX_REASON = 400  # characters
SUBJECT = r"[0-9a-f]{16}(?:[0-9a-f]{48})?"  # the id of a signing key, or the sha256 of an artifact

_ARTIFACT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocations:
    """What is revoked now, the newest first: artifacts by sha256, signing keys by id.

    `number` grows with each change, so that of two lists the one with the smaller number is older.
    """

    number: int
    artifacts: tuple[str, ...]
    key_ids: tuple[str, ...]


def check_subject(subject: str) -> None:
    """Check that `subject` names what can be revoked.

    Raises:
        InvalidSetting: it is neither the sha256 of an artifact nor the id of a signing key.
    """
    if not re.fullmatch(SUBJECT, subject):
        raise InvalidSetting(
            f"{subject[:80]!r} is neither the sha256 of a kernel, 64 hex digits, nor the id of a "
            'signing key, 16; "gemm-tuner resolve" prints the first, "gemm-tuner keys list" the '
            "second."
        )


def is_artifact(subject: str) -> bool:
    """Return whether a subject is an artifact, otherwise it is a key."""
    return bool(_ARTIFACT.fullmatch(subject))
