"""`gemm-tuner report` as a command: its file, its messages and its exit codes."""

import json
import sys
from pathlib import Path

import pytest
from samples import PROBLEM, make_trial

from gemm_tuner.cli import report
from gemm_tuner.cli.main import ANSWER_IS_NO, INTERRUPTED, SOMETHING_IS_MISSING, WRONG_USAGE, run
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a database with one answer."""
    url = f"sqlite:///{tmp_path}/records.sqlite3"
    engine = open_database(url)
    Repository(engine).add_trial(make_trial())
    engine.dispose()
    return url


def test_a_page_is_written_and_told_of(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"

    assert run(["report", "--db", url, "--out", str(out)]) == 0

    assert capsys.readouterr().out.startswith(f"1 answer written to {out} (")
    page = out.read_text()
    assert "Kernels of records.sqlite3" in page
    assert str(tmp_path) not in page  # others need not know where it was


def test_a_name_that_speaks_to_terminals_is_spelled(tmp_path: Path) -> None:
    file, out = tmp_path / "a\x1b[31mb.sqlite3", tmp_path / "page.html"
    engine = open_database(f"sqlite:///{file}")
    Repository(engine).add_trial(make_trial())
    engine.dispose()

    assert run(["report", "--db", f"sqlite:///{file}", "--out", str(out)]) == 0

    assert "\x1b" not in out.read_text()
    assert "a\\x1b[31mb.sqlite3" in out.read_text()


def test_the_same_facts_are_printed_as_json(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"

    code = run(["report", "--db", url, "--compare", url, "--out", str(out), "--json"])

    assert code == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["size_bytes"] == out.stat().st_size
    first, second = facts["databases"]
    assert first == second
    [answer] = first["answers"]
    assert answer["problem"] == PROBLEM.text
    assert answer["decision"] == "tuned"
    assert answer["ratio"]["median"] == 1.25
    assert answer["rests_on"] == "measured into this database"
    assert "The two beside each other" in out.read_text()


def test_the_database_is_not_changed(url: str, tmp_path: Path) -> None:
    database = tmp_path / "records.sqlite3"
    before = database.read_bytes()

    assert run(["report", "--db", url, "--out", str(tmp_path / "page.html")]) == 0

    assert database.read_bytes() == before


def test_without_matplotlib_the_command_says_how_to_get_it(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    code = run(["report", "--db", url, "--out", str(tmp_path / "page.html")])

    assert code == SOMETHING_IS_MISSING
    assert 'pip install "gemm-tuner[report]"' in capsys.readouterr().err.replace("\n", " ")


def test_an_empty_database_has_nothing_to_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, out = f"sqlite:///{tmp_path}/empty.sqlite3", tmp_path / "page.html"
    open_database(url).dispose()

    assert run(["report", "--db", url, "--out", str(out)]) == ANSWER_IS_NO

    assert "empty.sqlite3 has no confirmed kernel to report of" in capsys.readouterr().err
    assert not out.exists()


def test_a_missing_database_is_not_made(tmp_path: Path, url: str) -> None:
    missing = f"sqlite:///{tmp_path}/missing.sqlite3"
    out = str(tmp_path / "page.html")

    assert run(["report", "--db", missing, "--out", out]) == SOMETHING_IS_MISSING
    assert run(["report", "--db", url, "--compare", missing, "--out", out]) == SOMETHING_IS_MISSING

    assert not (tmp_path / "missing.sqlite3").exists()
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("", "it is a folder"),
        ("no/page.html", "there is no folder"),
        ("circle", "Too many levels of symbolic links"),
        ("records.sqlite3", "it is a file of the database"),
        ("records.sqlite3-wal", "it is a file of the database"),
        ("records.sqlite3-shm", "it is a file of the database"),
    ],
)
def test_a_place_for_no_page_is_refused_before_anything_is_read(
    url: str, tmp_path: Path, place: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "records.sqlite3"
    before = database.read_bytes()
    (tmp_path / "circle").symlink_to("circle")

    assert run(["report", "--db", url, "--out", str(tmp_path / place)]) == WRONG_USAGE

    assert why in capsys.readouterr().err
    assert database.read_bytes() == before


def test_a_full_disk_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--db", url, "--out", "/dev/full"]) == WRONG_USAGE

    assert "/dev/full cannot be written: No space left" in capsys.readouterr().err


def test_ctrl_c_leaves_a_page_that_was_there(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "page.html"
    out.write_text("an older page")

    def interrupt(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "_read", interrupt)

    assert run(["report", "--db", url, "--out", str(out)]) == INTERRUPTED

    assert out.read_text() == "an older page"
