"""`gemm-tuner db`: what it prints, and how it exits."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from samples import add_build, make_artifact, make_trial
from sqlalchemy import delete, select, update

from gemm_tuner.cli.main import ANSWER_IS_NO, SOMETHING_IS_MISSING, WRONG_USAGE, run
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.sql.tables import artifacts, verdicts


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return the URL of a store with a kernel and a trial."""
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    engine = open_database(url)
    repository = Repository(engine)
    add_build(repository)
    repository.add_trial(make_trial())
    engine.dispose()
    return url


def test_a_copy_says_what_it_did(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = f"sqlite:///{tmp_path}/other.sqlite3"

    assert run(["db", "copy", store, other]) == 0
    told = capsys.readouterr()
    assert "5 rows copied, 0 already there, 0 left out" in told.out
    assert "copy: trials" in told.err
    assert " left" in told.err

    assert run(["db", "copy", store, other, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"added": 0, "known": 5, "left_out": []}


def test_a_check_names_damages_and_exits_with_1(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["db", "check", "--db", store]) == 0
    assert "5 rows checked, 0 damages" in capsys.readouterr().out
    engine = open_database(store)
    with engine.begin() as connection:
        connection.execute(update(artifacts).values(compressed_binary=b"x"))
    engine.dispose()

    assert run(["db", "check", "--db", store]) == ANSWER_IS_NO
    told = capsys.readouterr()
    assert "5 rows checked, 1 damage" in told.out
    assert "it was damaged" in told.err


def test_verdicts_are_derived_again_from_trials(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = open_database(store)
    query = select(verdicts.c.document, verdicts.c.artifact)
    with engine.begin() as connection:
        before = connection.execute(query).all()
        connection.execute(update(verdicts).values(document="null", artifact=None))

    assert run(["db", "derive", "--db", store]) == 0
    told = capsys.readouterr()
    assert "1 verdict derived" in told.out
    assert "derive: problems" in told.err
    with engine.connect() as connection:
        assert connection.execute(query).all() == before
    assert before[0].artifact == make_artifact().sha256

    with engine.begin() as connection:
        connection.execute(delete(verdicts))
    assert run(["db", "derive", "--db", store, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"verdicts": 1}
    with engine.connect() as connection:
        assert connection.execute(query).all() == before
    engine.dispose()


def test_pruning_is_told_first_and_done_on_request(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = open_database(store)
    add_build(Repository(engine), b"a kernel that nothing names")

    assert run(["db", "prune", "--db", store]) == 0
    assert "1 kernel (" in capsys.readouterr().out
    assert run(["db", "prune", "--db", store, "--delete"]) == 0
    assert "1 kernel removed" in capsys.readouterr().out
    assert run(["db", "prune", "--db", store, "--delete", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"trials": 0, "kernels": 0, "removed": True}

    assert Repository(engine).holds(make_artifact())
    engine.dispose()


def test_a_missing_database_is_not_copied(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = f"sqlite:///{tmp_path}/missing.sqlite3"

    assert run(["db", "copy", missing, store]) == SOMETHING_IS_MISSING
    assert "there is no database" in capsys.readouterr().err
    assert not (tmp_path / "missing.sqlite3").exists()


def test_a_mirror_has_what_is_served_and_nothing_else(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kernel = tmp_path / "files", make_artifact().sha256
    place = folder / "v1" / "artifacts" / "sha256"

    assert run(["db", "mirror", str(folder), "--db", store]) == 0
    assert "1 kernel written, 0 already there, 0 removed" in capsys.readouterr().out
    assert sha256((place / kernel).read_bytes()).hexdigest() == kernel
    assert (place / kernel).stat().st_mode & 0o777 == 0o644

    (place / ("0" * 64)).write_bytes(b"of a kernel that was pruned")
    (place / f".{'0' * 64}abc").write_bytes(b"of a run that was killed")
    (place / "README").write_text("of someone else")
    (place / ("1" * 64)).mkdir()
    (place / ("2" * 64)).symlink_to("nowhere")
    assert run(["db", "mirror", str(folder), "--db", store, "--json"]) == 0
    expected = {"written": 0, "known": 1, "removed": 3, "left_out": []}
    assert json.loads(capsys.readouterr().out) == expected
    assert {file.name for file in place.iterdir()} == {kernel, "README", "1" * 64}

    assert run(["revoke", kernel, "--reason", "a test", "--db", store]) == 0
    assert run(["db", "mirror", str(folder), "--db", store]) == 0
    assert not (place / kernel).exists()


def test_a_mirror_leaves_out_what_is_damaged(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = open_database(store)
    with engine.begin() as connection:
        connection.execute(update(artifacts).values(compressed_binary=b"x"))
    engine.dispose()

    assert run(["db", "mirror", str(tmp_path / "files"), "--db", store]) == ANSWER_IS_NO
    told = capsys.readouterr()
    assert "it was damaged" in told.err
    assert "1 left out" in told.out


def test_a_folder_without_a_name_is_not_the_current_one(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert run(["db", "mirror", "", "--db", store]) == WRONG_USAGE
    assert "has no name" in capsys.readouterr().err
    assert not (tmp_path / "v1").exists()


def test_a_folder_that_cannot_be_written_is_told(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")

    assert run(["db", "mirror", str(tmp_path / "file"), "--db", store]) == SOMETHING_IS_MISSING
    assert "make the folder writable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("update trials set document = x'00'", "trials"),
        ("update artifacts set compressed_binary = 'x'", "artifacts"),
        ("update artifacts set attestation = 'x'", "artifacts"),
        ("update trials set document = cast(x'ff7b7d' as text)", "trials 1: cannot be read"),
        ("insert into revocations values (1, 'x', '', '', 0)", "a revocation names 'x'"),
    ],
)
def test_values_that_nothing_of_ours_stores_are_damages(
    store: str, capsys: pytest.CaptureFixture[str], statement: str, told: str
) -> None:
    engine = open_database(store)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()

    assert run(["db", "check", "--db", store]) == ANSWER_IS_NO

    out, err = capsys.readouterr()
    assert "unexpected" not in err
    assert told in err
    assert "0 damages" not in out
