"""A database whose file, folder or disk cannot be written is still read."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from restricted import full_disk, obeying_permissions
from samples import add_build, make_artifact, make_trial

from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import is_read_only, open_database

READ = """
import sys
from gemm_tuner.store.sql.database import is_read_only, open_database
from gemm_tuner.store.repository import Repository

engine = open_database(sys.argv[1], only_reads=True)
repository = Repository(engine)
print(is_read_only(engine), len(repository.trials()))
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """Yield a file that holds a trial; it can be removed in the end."""
    path = tmp_path / "site" / "store.sqlite3"
    engine = open_database(f"sqlite:///{path}")
    repository = Repository(engine)
    add_build(repository)
    repository.add_trial(make_trial())
    engine.dispose()
    yield path
    path.parent.chmod(0o700)


def read_as_user(path: Path) -> subprocess.CompletedProcess[str]:
    """Read a store in a process that obeys permissions, also where the tests run as root."""
    command = obeying_permissions([sys.executable, "-c", READ, f"sqlite:///{path}"])
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_file_that_cannot_be_written_is_read(store: Path) -> None:
    store.chmod(0o400)

    told = read_as_user(store)

    assert told.stdout.split()[1:] == ["1"], told.stderr


def test_a_folder_that_cannot_be_written_is_read(store: Path) -> None:
    store.chmod(0o400)
    store.parent.chmod(0o500)

    told = read_as_user(store)

    assert told.stdout.split() == ["True", "1"], told.stderr
    assert [path.name for path in store.parent.iterdir()] == ["store.sqlite3"]


def test_changes_that_were_not_yet_moved_into_the_file_are_read(store: Path) -> None:
    engine = open_database(f"sqlite:///{store}")
    Repository(engine).add_trial(make_trial(minute=1))
    store.parent.chmod(0o500)

    told = read_as_user(store)

    engine.dispose()
    assert told.stdout.split()[1:] == ["2"], told.stderr


def test_half_of_a_change_is_not_read(store: Path) -> None:
    engine = open_database(f"sqlite:///{store}")
    Repository(engine).add_trial(make_trial(minute=1))
    for end in ("", "-wal"):
        copy = Path(f"{store.parent}/copy.sqlite3{end}")
        copy.write_bytes(Path(f"{store}{end}").read_bytes())
    engine.dispose()
    store.parent.chmod(0o500)

    told = read_as_user(store.parent / "copy.sqlite3")

    assert told.returncode == 1
    assert "StoreFailed" in told.stderr.splitlines()[-1]
    assert "cannot be opened: " in told.stderr


def test_who_must_write_is_told_at_once(store: Path) -> None:
    with full_disk(), pytest.raises(StoreFailed, match="cannot be opened for writing: disk I/O"):
        open_database(f"sqlite:///{store}")


def test_a_store_on_a_full_disk_is_read_and_later_as_it_is_then(store: Path) -> None:
    with full_disk():
        reading = open_database(f"sqlite:///{store}", only_reads=True)
        assert len(Repository(reading).trials()) == 1
    assert is_read_only(reading)

    writing = open_database(f"sqlite:///{store}")
    Repository(writing).add_trial(make_trial(minute=1))

    assert len(Repository(reading).trials()) == 2
    writing.dispose()
    assert len(Repository(reading).trials()) == 2
    assert Repository(reading).binary(make_artifact().sha256) is not None
    reading.dispose()


def test_a_disk_that_is_full_is_to_be_checked(store: Path) -> None:
    with full_disk(), pytest.raises(StoreFailed, match=r"for writing: .*check its disk"):
        open_database(f"sqlite:///{store}")


def test_a_file_of_something_else_is_refused_also_there(tmp_path: Path) -> None:
    path = tmp_path / "places.sqlite3"
    with closing(sqlite3.connect(path)) as foreign:
        foreign.execute("PRAGMA journal_mode = WAL")
        foreign.execute("CREATE TABLE places (name TEXT)")

    with full_disk(), pytest.raises(StoreFailed, match="holds no records of gemm-tuner"):
        open_database(f"sqlite:///{path}", may_create=False)


@pytest.mark.parametrize(
    ("revision", "told"),
    [
        ("initial", "older schema, and cannot be written"),
        ("tomorrow", r"this version does not know \(revision tomorrow\); update gemm-tuner"),
    ],
)
def test_another_schema_is_refused_where_it_cannot_be_changed(
    store: Path, revision: str, told: str
) -> None:
    engine = open_database(f"sqlite:///{store}")
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = ?", (revision,))
    engine.dispose()

    with full_disk(), pytest.raises(StoreFailed, match=told):
        open_database(f"sqlite:///{store}", may_create=False)
