from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from gemm_tuner.domain.access import AuditEntry, Scope, TokenSecret
from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.store.audit import AuditLog
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.tokens import Tokens

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
SCOPES = (Scope.RESOLVE, Scope.RECORDS_WRITE)


def test_a_token_is_found_by_the_hash_of_its_secret_alone(engine: Engine) -> None:
    store = Tokens(engine)

    token, secret = store.create("ci", SCOPES, actor="me", now=NOW, lifetime=timedelta(days=1))

    assert store.with_secret(secret.digest) == token
    assert store.with_secret(TokenSecret.generate().digest) is None
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT * FROM tokens").all()
    assert secret.text not in str(rows)


def test_a_secret_has_256_random_bits_and_is_not_shown() -> None:
    first, second = TokenSecret.generate(), TokenSecret.generate()

    assert first.text.startswith("gt_")
    assert len(first.text) == 3 + 43
    assert first.text != second.text
    assert first.text not in repr(first)
    assert first.text not in f"{first}"


@pytest.mark.parametrize("text", ["", "gt_", "gt_short", "x" * 46, "gt_" + "ä" * 43])
def test_what_is_no_token_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        TokenSecret.parse(text)

    assert text in {"", "gt_"} or text not in str(caught.value)


def test_a_token_counts_until_it_expires_or_is_revoked(engine: Engine) -> None:
    store = Tokens(engine)
    token, secret = store.create("ci", SCOPES, actor="me", now=NOW, lifetime=timedelta(days=1))

    assert token.is_valid(NOW + timedelta(hours=23))
    assert not token.is_valid(NOW + timedelta(days=1))
    assert store.revoke(token.id, actor="me", now=NOW)
    revoked = store.with_secret(secret.digest)
    assert revoked is not None
    assert not revoked.is_valid(NOW)


def test_times_that_no_clock_can_be_compared_with_are_damages(engine: Engine) -> None:
    store = Tokens(engine)
    _token, secret = store.create("ci", SCOPES, actor="me", now=NOW, lifetime=timedelta(days=1))
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "update tokens set created_at = '2026-11-20T12:00:00', "
            "expires_at = '2026-11-21T12:00:00'"
        )

    with pytest.raises(StoreFailed, match="no zone"):
        store.with_secret(secret.digest)


def test_an_id_that_is_no_text_is_damage(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/store.sqlite3")  # which keeps values of any type
    store = Tokens(engine)
    store.create("ci", SCOPES, actor="me", now=NOW)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE tokens SET id = x'ff00'")

    with pytest.raises(StoreFailed, match="its id is no text"):
        store.all()
    engine.dispose()


def test_only_a_token_that_counts_can_be_revoked(engine: Engine) -> None:
    store = Tokens(engine)
    token, _secret = store.create("ci", SCOPES, actor="me", now=NOW)
    store.revoke(token.id, actor="me", now=NOW)

    assert not store.revoke(token.id, actor="me", now=NOW)
    assert not store.revoke("nobody", actor="me", now=NOW)


@pytest.mark.parametrize(
    ("name", "scopes", "lifetime"),
    [
        ("", SCOPES, None),
        ("\x1b[31m", SCOPES, None),
        ("x" * 65, SCOPES, None),
        ("ci", (), None),
        ("ci", SCOPES, timedelta(0)),
        ("ci", SCOPES, timedelta.max),
    ],
)
def test_a_token_that_makes_no_sense_is_refused(
    engine: Engine, name: str, scopes: tuple[Scope, ...], lifetime: timedelta | None
) -> None:
    with pytest.raises(InvalidSetting):
        Tokens(engine).create(name, scopes, actor="me", now=NOW, lifetime=lifetime)

    assert Tokens(engine).all() == ()


def test_who_made_and_revoked_a_token_is_in_the_audit_log(engine: Engine) -> None:
    store = Tokens(engine)
    token, secret = store.create("ci", SCOPES, actor="uid 7", now=NOW)
    store.revoke(token.id, actor="uid 8", now=NOW + timedelta(hours=1))

    made, revoked = AuditLog(engine).newest(10)

    subject = f"{token.id} ci"
    assert made == AuditEntry(
        at=NOW,
        actor="uid 7",
        action="token created",
        subject=subject,
        detail="records:write resolve",
    )
    assert (revoked.actor, revoked.action, revoked.subject) == ("uid 8", "token revoked", subject)
    assert secret.text not in repr((made, revoked))


def test_the_newest_entries_are_read_and_long_ones_are_cut(engine: Engine) -> None:
    log = AuditLog(engine)
    for number in range(5):
        log.append(AuditEntry(at=NOW, actor="me", action=f"{number}", subject="x" * 10_000))

    entries = log.newest(2)

    assert [entry.action for entry in entries] == ["3", "4"]
    assert len(entries[0].subject) < 1000
