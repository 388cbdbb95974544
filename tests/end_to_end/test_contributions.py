"""Contributions and imports by the command line, and what the audit log says of them."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from samples import make_trial

from gemm_tuner.cli.main import run
from gemm_tuner.store.contributions import Contributions
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.wire.record import dump_record


@pytest.fixture(autouse=True)
def database_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    monkeypatch.setenv("GEMM_TUNER_DB", url)
    return url


def _contribute(url: str) -> None:
    engine = open_database(url)
    Contributions(engine).add_records(
        [make_trial()], owner="a1b2", actor="token a1b2 (ci)", now=datetime.now(UTC)
    )
    engine.dispose()


def _actions(capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert run(["audit", "--json"]) == 0
    return [each["action"] for each in json.loads(capsys.readouterr().out)]


def test_contributions_are_listed_and_accepted(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _contribute(database_url)

    assert run(["contributions", "list"]) == 0
    assert "a1b2" in capsys.readouterr().out
    assert run(["contributions", "accept", "a1b2"]) == 0
    assert "1 new record. None is served" in capsys.readouterr().out
    assert run(["contributions", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert _actions(capsys) == ["record contributed", "contributions accepted"]


def test_contributions_are_dropped(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    _contribute(database_url)

    assert run(["contributions", "drop", "a1b2"]) == 0
    assert run(["contributions", "drop", "a1b2"]) == 1
    assert _actions(capsys) == ["record contributed", "contributions dropped"]


def test_an_import_that_adds_something_is_in_the_audit_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(dump_record(make_trial()) + "\n")

    assert run(["records", "import", str(file)]) == 0
    assert run(["records", "import", str(file)]) == 0

    assert _actions(capsys) == ["records imported"]
