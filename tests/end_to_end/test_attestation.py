"""A database that someone else wrote to: nothing of theirs is served or loaded, there or here."""

import json
import zlib
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import PROBLEM, Site
from sqlalchemy import Connection, text

from gemm_tuner import Client
from gemm_tuner.cli.main import ANSWER_IS_NO, INTERRUPTED, WRONG_USAGE, run
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.trust.attestation import MeasuringKeys

SIZES = ["8", "32", "16", "--epilogue", "bias+relu"]
ATTACKERS = b"\x7fELF of an attacker"
DIGEST = sha256(ATTACKERS).hexdigest()


@pytest.fixture
def attacked(site: Site) -> Site:
    """Return a place whose trial and artifact name an attacker's library, with digests that fit."""
    engine = open_database(site.settings.database_url)
    with engine.begin() as connection:
        connection.execute(text("PRAGMA defer_foreign_keys = ON"))
        _rewrite_trial(connection)
        (document,) = connection.execute(text("SELECT document FROM artifacts")).one()
        description = json.loads(document) | {"sha256": DIGEST, "size_bytes": len(ATTACKERS)}
        connection.execute(
            text("UPDATE artifacts SET sha256 = :s, document = :d, compressed_binary = :b"),
            {"s": DIGEST, "d": _canonical(description), "b": zlib.compress(ATTACKERS)},
        )
    engine.dispose()
    return site


def _rewrite_trial(connection: Connection) -> None:
    (document,) = connection.execute(text("SELECT document FROM trials")).one()
    record = json.loads(document)
    record["artifact"] |= {"sha256": DIGEST, "size_bytes": len(ATTACKERS)}
    changed = _canonical(record)
    connection.execute(
        text("UPDATE trials SET id = :id, document = :document"),
        {"id": sha256(changed.encode()).hexdigest(), "document": changed},
    )


def _canonical(value: Any) -> str:  # noqa: ANN401 - JSON
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def test_an_attackers_library_is_not_served(attacked: Site, tmp_path: Path) -> None:
    with attacked.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        artifact = httpx.get(f"{address}/v1/artifacts/sha256/{DIGEST}", trust_env=False)

    assert isinstance(kernel, FallbackKernel)
    assert artifact.status_code == 404
    assert "not attested" in artifact.json()["detail"]


def test_an_attackers_library_is_not_used_by_local_commands(
    attacked: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tmp_path / "kernel.so"
    where = ["--db", attacked.settings.database_url]

    assert run(["resolve", *SIZES, *where, "--json"]) == ANSWER_IS_NO
    facts = json.loads(capsys.readouterr().out)
    assert facts["artifact"] is None
    assert any("the database was changed" in step for step in facts["explain"])
    assert run(["source", *SIZES, *where, "--binary", str(library)]) == ANSWER_IS_NO
    assert not library.exists()


def test_the_answer_says_which_key_attested(site: Site, tmp_path: Path) -> None:
    own = MeasuringKeys().own()
    assert own is not None
    key_id = sha256(bytes.fromhex(own)).hexdigest()[:16]

    with site.serving() as address:
        resolution = Client(address, cache_dir=tmp_path / "cache").resolve(PROBLEM)

    assert any(f"the measuring key {key_id}" in step for step in resolution.explain)


@pytest.fixture
def of_another(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Make the store one that another user filled; return that user's measuring key."""
    assert site.repository.trials()
    key = MeasuringKeys().own()
    assert key is not None
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "reader"))
    return key


def test_what_another_user_measured_is_served_when_their_key_is_accepted(
    site: Site, of_another: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        refused = client.kernel(PROBLEM)
        explain = client.resolve(PROBLEM).explain
        (command,) = {
            step.partition('run "gemm-tuner ')[2].partition('"')[0]
            for step in explain
            if step.startswith("not served")
        }
        assert run(command.split()) == 0
        accepted = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        assert run(["keys", "forget", of_another]) == 0
        forgotten = Client(address, cache_dir=tmp_path / "cache").resolve(PROBLEM)

    assert command == f"keys accept {of_another}"
    assert isinstance(refused, FallbackKernel)
    assert isinstance(accepted, Kernel)
    assert forgotten.verdict.artifact is None
    assert of_another in capsys.readouterr().out


def test_what_nobody_attests_is_attested_by_consent(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_database(site.settings.database_url)
    with engine.begin() as connection:
        for table in ("trials", "artifacts"):
            connection.execute(
                text(f"UPDATE {table} SET attested_by = NULL, attestation = NULL")  # noqa: S608
            )
    engine.dispose()
    where = ["--db", site.settings.database_url]

    assert run(["resolve", *SIZES, *where]) == ANSWER_IS_NO
    monkeypatch.setattr("sys.stdin", StringIO("no\n"))
    assert run(["records", "attest", *where]) == INTERRUPTED
    assert run(["resolve", *SIZES, *where]) == ANSWER_IS_NO
    capsys.readouterr()

    assert run(["records", "attest", "--yes", *where]) == 0
    assert "1 trial and 1 kernel attested" in capsys.readouterr().out
    assert run(["resolve", *SIZES, *where]) == 0


def test_measuring_keys_are_listed(
    site: Site, of_another: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["keys", "accept", of_another]) == 0
    capsys.readouterr()

    assert run(["keys", "measuring"]) == 0

    assert capsys.readouterr().out == f"accepted {of_another}\n"
    assert Repository(open_database(site.settings.database_url)).trials()


@pytest.mark.parametrize("arguments", [["keys", "accept", "abc"], ["keys", "forget", "abc"]])
def test_what_is_neither_address_nor_key_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == WRONG_USAGE
    assert "64 hex digits" in capsys.readouterr().err


def test_a_fault_of_the_measuring_key_is_not_one_of_the_question(
    site: Site, tmp_path: Path
) -> None:
    MeasuringKeys().own_path.chmod(0o644)

    with site.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "was answered with 503: Store failed" in kernel.reason
