"""Reading and writing the tokens of a service; of their secrets only hashes are kept."""

import secrets
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, insert, select, update

from gemm_tuner.domain.access import AuditEntry, Scope, Token, TokenSecret
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.store.audit import append_audit
from gemm_tuner.store.integrity import as_row
from gemm_tuner.store.sql.statements import Statements, translated_errors
from gemm_tuner.store.sql.tables import tokens

_ID_BYTES = 6


class Tokens(Statements):
    """The tokens of one database. Every change is in the audit log, in the same transaction."""

    def create(
        self,
        name: str,
        scopes: Collection[Scope],
        *,
        actor: str,
        now: datetime,
        lifetime: timedelta | None = None,
    ) -> tuple[Token, TokenSecret]:
        """Keep a new token, and return it with its secret, which is nowhere else.

        Raises:
            InvalidSetting: name, scopes or lifetime cannot be used.
        """
        secret = TokenSecret.generate()
        created_at = now.astimezone(UTC).replace(microsecond=0)
        try:
            expires_at = None if lifetime is None else created_at + lifetime
        except OverflowError:
            raise InvalidSetting(
                "the token would expire after the year 9999; leave its expiry out."
            ) from None
        token = Token(
            id=secrets.token_hex(_ID_BYTES),
            name=name,
            scopes=frozenset(scopes),
            created_at=created_at,
            expires_at=expires_at,
        )
        row = {
            "id": token.id,
            "secret_sha256": secret.digest,
            "name": token.name,
            "scopes": " ".join(sorted(token.scopes)),
            "created_at": _text_of(created_at),
            "expires_at": None if expires_at is None else _text_of(expires_at),
        }
        entry = AuditEntry(
            at=created_at,
            actor=actor,
            action="token created",
            subject=f"{token.id} {token.name}",
            detail=row["scopes"] or "",
        )
        with self._writing() as connection:
            connection.execute(insert(tokens).values(row))
            append_audit(connection, entry)
        return token, secret

    def revoke(self, token_id: str, *, actor: str, now: datetime) -> bool:
        """Revoke a token for ever; return False if it is revoked already, or is not there."""
        is_here = (tokens.c.id == token_id) & tokens.c.revoked_at.is_(None)
        with self._writing() as connection:
            row = connection.execute(select(tokens.c.name).where(is_here)).first()
            if row is None:
                return False
            connection.execute(update(tokens).where(is_here).values(revoked_at=_text_of(now)))
            entry = AuditEntry(
                at=now, actor=actor, action="token revoked", subject=f"{token_id} {row[0]}"
            )
            append_audit(connection, entry)
        return True

    def all(self) -> tuple[Token, ...]:
        """Return every token, the oldest first."""
        with self._reading() as connection:
            rows = connection.execute(_query().order_by(tokens.c.created_at, tokens.c.id)).all()
        with translated_errors():
            return tuple(_token_of(row) for row in rows)

    def with_secret(self, digest: str) -> Token | None:
        """Return the token whose secret has this sha256, valid or not."""
        return self._one(tokens.c.secret_sha256 == digest)

    def with_id(self, token_id: str) -> Token | None:
        """Return the token with this id, valid or not."""
        return self._one(tokens.c.id == token_id)

    def _one(self, which: ColumnElement[bool]) -> Token | None:
        row = self._first(_query().where(which))
        with translated_errors():
            return None if row is None else _token_of(row)


def _query() -> Select[*tuple[Any, ...]]:
    return select(
        tokens.c.id,
        tokens.c.name,
        tokens.c.scopes,
        tokens.c.created_at,
        tokens.c.expires_at,
        tokens.c.revoked_at,
    )


def _token_of(row: Row[*tuple[Any, ...]]) -> Token:
    with as_row(f"token {row.id}"):
        if not isinstance(row.id, str):
            raise TypeError("its id is no text")
        token = Token(
            id=row.id,
            name=row.name,
            scopes=frozenset(Scope(each) for each in row.scopes.split()),
            created_at=_time_of(row.created_at),
            expires_at=row.expires_at and _time_of(row.expires_at),
        )
    revoked_at = row.revoked_at and _time_of(row.revoked_at)
    return replace(token, revoked_at=revoked_at)


def _time_of(text: str) -> datetime:
    """Return the time that `_text_of` wrote; one without a zone could be compared with none."""
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"the time {text} has no zone")
    return time


def _text_of(time: datetime) -> str:
    """Return a time as text; texts of times sort as the times do."""
    return time.astimezone(UTC).isoformat(timespec="seconds")
