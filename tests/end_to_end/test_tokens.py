"""Tokens and the audit log, by the command line."""

import json
from datetime import UTC, datetime

import pytest

from gemm_tuner.cli.main import WRONG_USAGE, run
from gemm_tuner.domain.access import AuditEntry, Scope
from gemm_tuner.store.audit import AuditLog
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.tokens import Tokens


@pytest.fixture(autouse=True)
def database_url(store_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GEMM_TUNER_DB", store_url)
    return store_url


def test_a_token_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tokens", "create", "ci", "--scope", "resolve", "--days", "90"]) == 0
    secret = capsys.readouterr().out.strip()
    assert secret.startswith("gt_")

    assert run(["tokens", "list", "--json"]) == 0
    listed = capsys.readouterr().out
    assert secret not in listed
    (token,) = json.loads(listed)
    assert (token["name"], token["scopes"], token["revoked_at"]) == ("ci", ["resolve"], None)

    assert run(["tokens", "revoke", token["id"]]) == 0
    assert run(["tokens", "revoke", token["id"]]) == 1
    assert run(["tokens", "list"]) == 0
    assert "revoked" in capsys.readouterr().out

    assert run(["audit", "--json"]) == 0
    printed = capsys.readouterr().out
    assert [each["action"] for each in json.loads(printed)] == ["token created", "token revoked"]
    assert secret not in printed


@pytest.mark.parametrize("days", ["0", "-1", "nan", "inf", "1e300", "1e7"])
def test_a_lifetime_that_is_none_is_wrong_usage(days: str) -> None:
    assert run(["tokens", "create", "ci", "--scope", "resolve", "--days", days]) == 2


def test_an_unknown_scope_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tokens", "create", "ci", "--scope", "root"]) == 2
    assert "records:write" in capsys.readouterr().err


def test_a_scope_that_permits_nothing_is_not_given(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tokens", "create", "ci", "--scope", "resolve", "--scope", "worker"]) == WRONG_USAGE
    told = capsys.readouterr().err
    assert "a worker needs no token, but the database" in told
    assert "admin" in told.partition("use some of")[2]
    assert "worker" not in told.partition("use some of")[2]

    older = frozenset({Scope.RESOLVE, Scope.WORKER})
    now = datetime.now(UTC)
    store = Tokens(open_database(database_url))
    _token, secret = store.create("older", older, actor="me", now=now)
    kept = store.with_secret(secret.digest)
    assert kept is not None
    assert kept.scopes == older
    assert kept.is_valid(now)


@pytest.mark.parametrize(
    "command",
    [
        ["tokens", "revoke", "\udcff"],
        ["contributions", "accept", "\udcff"],
        ["contributions", "drop", "\udcff"],
        ["revoke", "ab" * 32, "--reason", "\udcff"],
    ],
)
def test_what_is_no_text_is_wrong_usage(
    command: list[str], database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    open_database(database_url).dispose()

    assert run(command) == WRONG_USAGE

    assert r"'\udcff' is no text in UTF-8" in capsys.readouterr().err


def test_what_others_wrote_cannot_command_a_terminal(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = open_database(database_url)
    AuditLog(engine).append(
        AuditEntry(at=datetime.now(UTC), actor="\x1b[2Jme", action="x\r", subject="y")
    )
    engine.dispose()

    assert run(["audit"]) == 0

    assert "\\x1b[2Jme" in capsys.readouterr().out
