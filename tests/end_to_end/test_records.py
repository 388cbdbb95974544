"""Records move between stores by files and by standard output and input."""

import json
import signal
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from served import PROBLEM, Site

from gemm_tuner.cli.main import INTERRUPTED, run
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database


def test_records_move_to_another_store(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "records.jsonl"
    other = f"sqlite:///{tmp_path}/other.sqlite3"
    run(["records", "export", str(file), "--db", site.settings.database_url])
    with file.open("a") as stream:
        stream.write("not a record\n")
    capsys.readouterr()

    code = run(["records", "import", str(file), "--db", other])

    captured = capsys.readouterr()
    assert code == 1
    assert captured.out == "1 record added, 0 already known, 1 line left out\n"
    assert "line 2 was left out" in captured.err
    (trial,) = Repository(open_database(other)).trials(origin=None)
    assert trial.problem == PROBLEM


def test_records_go_from_standard_output_to_standard_input(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = f"sqlite:///{tmp_path}/other.sqlite3"

    said = []
    for file in ([], ["-"]):
        assert run(["records", "export", *file, "--db", site.settings.database_url]) == 0
        said.append(capsys.readouterr().out)
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(said[0].encode())))
    assert run(["records", "import", "-", "--db", other]) == 0

    (record,) = said[0].splitlines()
    assert json.loads(record)["problem"] == PROBLEM.text
    assert said[1] == said[0]
    assert not Path("-").exists()
    assert capsys.readouterr().out.startswith("1 record added")


def test_a_closed_standard_input_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)

    assert run(["records", "import", "-", "--db", f"sqlite:///{tmp_path}/other.sqlite3"]) == 2

    told = capsys.readouterr().err
    assert told == "Error: file - cannot be read: standard input is closed; name another.\n"


def test_an_aborted_import_keeps_what_it_added_and_says_so(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"sqlite:///{tmp_path}/other.sqlite3"
    assert run(["records", "export", "--db", site.settings.database_url]) == 0
    (line,) = capsys.readouterr().out.splitlines()

    def interrupted(_stream: object) -> Iterator[str]:
        yield line
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO()))
    monkeypatch.setattr("gemm_tuner.cli.records.read_lines", interrupted)
    monkeypatch.setattr("gemm_tuner.store.trials.IMPORTED_AT_ONCE", 1)
    # A shell without job control lets what it starts in the background ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run(["records", "import", "-", "--db", other]) == INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)

    assert capsys.readouterr().err == "Aborted; what was found before is kept.\n"
    assert len(Repository(open_database(other)).trials(origin=None)) == 1
    assert run(["audit", "--db", other]) == 0
    assert "aborted; what was added before is kept" in capsys.readouterr().out
