import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.store.database import (
    default_database_url,
    is_current,
    newest_revision,
    open_database,
    writing,
)
from gemm_tuner.store.tables import Base


def test_migrations_make_the_tables_of_the_models(engine: Engine) -> None:
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)

    assert differences == []


def test_opening_creates_missing_folders_and_the_newest_schema(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/a/b/store.sqlite3")

    assert is_current(engine)
    engine.dispose()


def test_opening_again_keeps_what_is_there(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    first = open_database(url)
    with first.begin() as connection:
        connection.exec_driver_sql("INSERT INTO cpus VALUES ('id', 'document', 'exact', 'class')")
    first.dispose()

    second = open_database(url)

    with second.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM cpus").scalar() == 1
    second.dispose()


def test_a_store_at_the_newest_schema_opens_while_another_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.database.BUSY_TIMEOUT_MS", 0)
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    first = open_database(url)

    with writing(first).begin():
        second = open_database(url)

    assert is_current(second)
    first.dispose()
    second.dispose()


def test_a_folder_name_with_a_percent_sign_is_fine(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/100%/store.sqlite3")

    assert is_current(engine)
    engine.dispose()


@pytest.mark.parametrize(
    ("pragma", "expected"), [("journal_mode", "wal"), ("foreign_keys", 1), ("synchronous", 2)]
)
def test_sqlite_is_set_up(engine: Engine, pragma: str, expected: str | int) -> None:
    with engine.connect() as connection:
        assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() == expected


def test_an_unwritable_folder_is_a_clear_error() -> None:
    with pytest.raises(StoreFailed, match=r"/proc/none/store\.sqlite3 cannot be opened.*--db"):
        open_database("sqlite:////proc/none/store.sqlite3")


def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, not a database " * 100)

    with pytest.raises(StoreFailed, match="not a database"):
        open_database(f"sqlite:///{path}")


def test_a_schema_from_a_newer_version_is_a_clear_error(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    engine = open_database(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")

    assert not is_current(engine)
    engine.dispose()
    with pytest.raises(StoreFailed, match="update gemm-tuner"):
        open_database(url)


@pytest.mark.parametrize("url", ["store.sqlite3", "nonsense://host/x", "postgresql+none://h/x"])
def test_an_unusable_url_is_a_clear_error(url: str) -> None:
    with pytest.raises(InvalidSetting, match="cannot be used"):
        open_database(url)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(InvalidSetting) as caught:
        open_database("nonsense://user:secret@host/x")

    assert "secret" not in str(caught.value)


def test_the_newest_revision_is_the_one_that_alembic_finds() -> None:
    folder = Path(open_database.__code__.co_filename).parent / "migrations"

    assert newest_revision() == ScriptDirectory(str(folder)).get_current_head()


def test_who_only_reads_creates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "mistyped.sqlite3"

    with pytest.raises(StoreFailed, match=r"no database .*/folder/mistyped\.sqlite3; .*--db"):
        open_database(f"sqlite:///{path}", may_create=False)

    assert not path.parent.exists()


def test_who_only_reads_leaves_a_foreign_database_alone(tmp_path: Path) -> None:
    path = tmp_path / "places.sqlite3"
    with closing(sqlite3.connect(path)) as foreign:
        foreign.execute("CREATE TABLE places (name TEXT)")
    before = path.read_bytes()

    with pytest.raises(StoreFailed, match=r"places\.sqlite3 holds no records of gemm-tuner"):
        open_database(f"sqlite:///{path}", may_create=False)

    assert path.read_bytes() == before


def test_who_only_reads_opens_what_is_there(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    open_database(url).dispose()

    engine = open_database(url, may_create=False)

    assert is_current(engine)
    engine.dispose()


def test_the_environment_overrides_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMM_TUNER_DB", "sqlite:////elsewhere.sqlite3")
    assert default_database_url() == "sqlite:////elsewhere.sqlite3"

    monkeypatch.delenv("GEMM_TUNER_DB")
    assert default_database_url().endswith("gemm-tuner.sqlite3")
