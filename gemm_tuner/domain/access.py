"""Tokens of a service: what their holder may do, and how a token is written."""

import re
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from typing import Self

from gemm_tuner.errors import InvalidSetting

PREFIX = "gt_"

_SECRET_BYTES = 32
_TEXT = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}")


class Scope(StrEnum):
    """What a caller may do; no scope includes another."""

    RESOLVE = "resolve"  # ask for verdicts and kernels, and read records
    TUNE = "tune"  # ask for problems to be tuned
    RECORDS_WRITE = "records:write"  # contribute records and artifacts
    WORKER = "worker"  # nothing: workers use the database; older tokens have it
    METRICS = "metrics"  # read how the service does
    ADMIN = "admin"  # change what the service believes

    @classmethod
    def names_to_give(cls) -> str:
        """Return the names of the scopes that a new token may have."""
        return ", ".join(scope for scope in cls if scope is not cls.WORKER)

    @classmethod
    def parse_new(cls, text: str) -> Self:
        """Return the scope of this name, for a new token.

        Raises:
            InvalidSetting: there is none, or it permits nothing.
        """
        if text == cls.WORKER:
            raise InvalidSetting(
                f"scope {text!r} permits nothing: a worker needs no token, but the database of the "
                f"service (--db); use some of: {cls.names_to_give()}."
            )
        try:
            return cls(text)
        except ValueError:
            raise InvalidSetting(
                f"scope {text!r} is not known; use some of: {cls.names_to_give()}."
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSecret:
    """The text that the holder of a token sends; no error, log or `repr` shows it."""

    text: str = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        """Return a new secret of 256 random bits."""
        return cls(text=PREFIX + secrets.token_urlsafe(_SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the secret written as `text`.

        Raises:
            InvalidSetting: it cannot be a token; the message does not repeat it.
        """
        if not _TEXT.fullmatch(text):
            raise InvalidSetting(
                f"the token is not {PREFIX} and 43 letters; "
                'give what "gemm-tuner tokens create" printed.'
            )
        return cls(text=text)

    @property
    def digest(self) -> str:
        """Return the sha256 that is kept in its place."""
        return sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token as the service knows it: who holds it, and what they may do until when.

    Times have a zone.
    """

    id: str
    name: str
    scopes: frozenset[Scope]
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidSetting(
                f"token name {self.name!r} cannot be used; "
                "write up to 64 letters, digits, spaces, dots, dashes or signs @."
            )
        if not self.scopes:
            raise InvalidSetting(f"token {self.name!r} has no scope; give it at least one.")
        if self.expires_at is not None and self.expires_at <= self.created_at:
            raise InvalidSetting(f"token {self.name!r} would expire at once; give it more time.")

    def is_valid(self, now: datetime) -> bool:
        """Return whether the token counts at this time."""
        is_expired = self.expires_at is not None and now >= self.expires_at
        return self.revoked_at is None and not is_expired


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Something that was changed: when, by whom, and what was done to what."""

    at: datetime
    actor: str
    action: str
    subject: str
    detail: str = ""
