import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from migrating import downgrade
from postgres import PostgresServer
from samples import CONTEXT, CPU, PROBLEM
from sqlalchemy import Engine, make_url

from gemm_tuner.domain.record import SweepEnd
from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import (
    MIGRATIONS,
    default_database_url,
    is_current,
    newest_revision,
    open_database,
    parse_url,
    writing,
)
from gemm_tuner.store.sql.postgresql import create_postgresql_engine
from gemm_tuner.store.sql.statements import RowsDamaged


def test_opening_creates_missing_folders_and_the_newest_schema(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/a/b/store.sqlite3")

    assert is_current(engine)
    engine.dispose()


def test_opening_again_keeps_what_is_there(empty_url: str) -> None:
    first = open_database(empty_url)
    with first.begin() as connection:
        connection.exec_driver_sql("INSERT INTO cpus VALUES ('id', 'document', 'exact', 'class')")
    first.dispose()

    second = open_database(empty_url)

    with second.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM cpus").scalar() == 1
    second.dispose()


def test_the_end_of_a_sweep_stays_when_formats_get_ends_of_their_own(empty_url: str) -> None:
    end = SweepEnd(baseline="onednn 3.2.0", is_exhausted=True, budget_s=30.0)
    key = {"toolchain": "gcc 12.2.0", "generator": "0.1.0-aaaa"}
    engine = open_database(empty_url)
    for packed_format in ("", "f32 768x3072 panels nr16"):
        in_format = key | {"packed_format": packed_format}
        Repository(engine).mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **in_format, end=end)
    with writing(engine).begin() as connection:
        downgrade(connection, "quorum")
    engine.dispose()

    engine = open_database(empty_url)

    ends = Repository(engine).sweep_ends(PROBLEM, CPU.exact_key, CONTEXT, **key)
    forgotten = Repository(engine).sweep_ends(PROBLEM, CPU.exact_key, CONTEXT, **in_format)
    engine.dispose()
    assert (ends, forgotten) == ((end,), ())


def test_a_store_at_the_newest_schema_opens_while_another_writes(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.sql.sqlite.BUSY_TIMEOUT_MS", 0)
    first = open_database(database_url)

    with writing(first).begin():
        second = open_database(database_url)

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
def test_sqlite_is_set_up(tmp_path: Path, pragma: str, expected: str | int) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/store.sqlite3")
    with engine.connect() as connection:
        assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() == expected
    engine.dispose()


@pytest.mark.proof
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("statement_timeout", "1min"),
        ("lock_timeout", "30s"),
        ("idle_in_transaction_session_timeout", "1min"),
        ("application_name", "gemm-tuner"),
    ],
)
def test_postgresql_is_set_up(postgres: PostgresServer, setting: str, expected: str) -> None:
    engine = create_postgresql_engine(make_url(postgres.url("postgres")))
    with engine.connect() as connection:
        assert connection.exec_driver_sql(f"SHOW {setting}").scalar() == expected
    engine.dispose()


@pytest.mark.proof
def test_what_a_url_says_of_a_connection_comes_first(postgres: PostgresServer) -> None:
    url = make_url(postgres.url("postgres") + "&application_name=mine")
    engine = create_postgresql_engine(url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW application_name").scalar() == "mine"
    engine.dispose()


@pytest.mark.proof
def test_a_connection_that_the_server_closed_is_replaced(postgres: PostgresServer) -> None:
    engine = create_postgresql_engine(make_url(postgres.url("postgres")))
    with engine.connect() as connection:
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
    postgres.run_sql(f"SELECT pg_terminate_backend({pid}, 30000)")

    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT pg_backend_pid()").scalar() != pid
    engine.dispose()


@pytest.mark.proof
def test_a_server_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(
        StoreFailed, match=r"database postgresql://me:\*\*\*@.* cannot be opened"
    ) as caught:
        open_database(f"postgresql://me:secret@/x?host={tmp_path}&sslpassword=secret")

    assert "secret" not in str(caught.value)
    assert "check that its server runs and lets you in, or name another with --db" in str(
        caught.value
    )


def test_an_unwritable_folder_is_a_clear_error() -> None:
    with pytest.raises(StoreFailed, match=r"/proc/none/store\.sqlite3 cannot be opened.*--db"):
        open_database("sqlite:////proc/none/store.sqlite3")


def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, not a database " * 100)

    with pytest.raises(StoreFailed, match="is no SQLite database"):
        open_database(f"sqlite:///{path}")


def test_a_schema_from_a_newer_version_is_a_clear_error(database_url: str) -> None:
    engine = open_database(database_url)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")

    assert not is_current(engine)
    engine.dispose()
    with pytest.raises(StoreFailed, match="update gemm-tuner"):
        open_database(database_url)


@pytest.mark.parametrize(
    "url", ["store.sqlite3", "nonsense://host/x", "postgresql+none://h/x", "mysql://h/x"]
)
def test_an_unusable_url_is_a_clear_error(url: str) -> None:
    with pytest.raises(InvalidSetting, match=r"database URL .* (cannot be used|not understood)"):
        open_database(url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("sqlite://host/store.sqlite3", "SQLite has no host and no user"),
        ("sqlite://user@/store.sqlite3", "SQLite has no host and no user"),
        ("sqlite://:80/store.sqlite3", "SQLite has no host and no user"),
        ("sqlite:///a%00b", "no name has a null byte"),
    ],
)
def test_a_url_of_sqlite_names_a_file_alone(
    url: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(InvalidSetting, match=why):
        open_database(url)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("postgresql+psycopg_async://127.0.0.1:1/d", "psycopg is used; begin it with postgresql:"),
        ("postgresql+psycopg2://127.0.0.1:1/d", "psycopg is used; begin it with postgresql://"),
        ("postgresql+://127.0.0.1:1/d", "psycopg is used; begin it with postgresql://"),
        ("sqlite+aiosqlite:///x", "pysqlite is used; begin it with sqlite://"),
        ("sqlite+:///x", "pysqlite is used; begin it with sqlite://"),
        ("postgresql://127.0.0.1:1/d%00e", "no name has a null byte"),
        ("postgresql://127.0.0.1:1/d?user=%00", "no name has a null byte"),
        ("postgresql://u:my@pw@127.0.0.1:1/d", "an '@' too many; write one .* as %40"),
        ("postgresql://u@127.0.0.1:1/d?application_name=a@b", "an '@' too many; .* as %40"),
        ("sqlite:///x?y.sqlite3", "no options here; leave out .* or write one in a name as %3F"),
    ],
)
def test_what_a_url_may_not_have_is_named(url: str, why: str) -> None:
    with pytest.raises(InvalidSetting, match=why) as caught:
        open_database(url)

    assert "pip install" not in str(caught.value)


def test_an_at_sign_may_be_in_a_password_and_in_the_name_of_a_file() -> None:
    assert parse_url("postgresql+psycopg://me:a%40b@127.0.0.1:1/d").host == "127.0.0.1"
    assert parse_url("postgresql://me@127.0.0.1:1/a%40b").database == "a@b"
    assert parse_url("sqlite+pysqlite:///x@y@z").database == "x@y@z"


@pytest.mark.parametrize(
    "options", ["timeout=abc", "timeout=5", "mode=ro", "foo=bar", "uri=true&foo=1", "a=1&a=2"]
)
def test_an_option_of_sqlite_is_refused_by_its_name(options: str, tmp_path: Path) -> None:
    name = options.partition("=")[0]

    with pytest.raises(InvalidSetting, match=f"takes no options here, such as '{name}'.*leave out"):
        open_database(f"sqlite:///{tmp_path}/store.sqlite3?{options}")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "nonsense://user:secret@host/x",
        "postgresql://user:secret@host:port/x",
        "postgresql:user:secret@host",
        "nonsense://user@host/x?password=secret",
        "postgresql:host?sslpassword=secret",
        "sqlite:///file?password=secret",
        "postgresql://user:my@secret@host/x",
        "postgresql://user:my@sec/secret@host/x",
    ],
)
def test_a_password_is_not_shown(url: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        open_database(url)

    assert "secret" not in str(caught.value)


def test_the_newest_revision_is_the_one_that_alembic_finds() -> None:
    assert newest_revision() == ScriptDirectory(str(MIGRATIONS)).get_current_head()


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


def test_who_only_reads_opens_what_is_there(database_url: str) -> None:
    engine = open_database(database_url, may_create=False)

    assert is_current(engine)
    engine.dispose()


def test_who_only_reads_makes_no_tables(empty_url: str) -> None:
    with pytest.raises(StoreFailed, match=r"there is no database|holds no records"):
        open_database(empty_url, may_create=False)


def test_the_environment_overrides_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMM_TUNER_DB", "sqlite:////elsewhere.sqlite3")
    assert default_database_url() == "sqlite:////elsewhere.sqlite3"

    monkeypatch.delenv("GEMM_TUNER_DB")
    assert default_database_url().endswith("gemm-tuner.sqlite3")


def _count(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM cpus").scalar_one())


def _add_cpu(engine: Engine, number: int) -> None:
    with writing(engine).begin() as connection:
        row = f"{number}", "d", f"{number}", "c"
        connection.exec_driver_sql("INSERT INTO cpus VALUES (?, ?, ?, ?)", row)


def test_what_is_written_is_in_the_file_that_replaced_another(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite3"
    engine = open_database(f"sqlite:///{file}")
    _add_cpu(engine, 1)
    other = open_database(f"sqlite:///{tmp_path}/backup.sqlite3")
    _add_cpu(other, 2)
    _add_cpu(other, 3)
    other.dispose()
    for path in tmp_path.glob("store.sqlite3*"):
        path.rename(tmp_path / f"old-{path.name}")
    (tmp_path / "backup.sqlite3").rename(file)

    assert _count(engine) == 2
    _add_cpu(engine, 4)
    engine.dispose()

    assert _count(open_database(f"sqlite:///{file}")) == 3


def test_nothing_is_written_where_the_file_was_removed(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite3"
    engine = open_database(f"sqlite:///{file}")
    _add_cpu(engine, 1)
    file.unlink()

    for _try in range(2):
        with pytest.raises(StoreFailed, match="was removed; put it, or a copy, back"):
            _add_cpu(engine, 2)
    assert not is_current(engine)
    assert not file.exists()


def test_a_data_folder_whose_name_is_no_text_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEMM_TUNER_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", f"{tmp_path}/\udcff")

    with pytest.raises(InvalidSetting, match="no text in UTF-8; set XDG_DATA_HOME"):
        open_database()


def test_a_url_of_no_text_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="is not understood"):
        open_database("sqlite:///\udcff")


def test_a_malformed_file_asks_for_a_backup(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite3"
    engine = open_database(f"sqlite:///{file}")
    engine.dispose()
    content = bytearray(file.read_bytes())
    content[100:4096] = bytes(3996)  # the first page of the schema, and not the name of the format
    file.write_bytes(content)

    with pytest.raises(StoreFailed, match="put a copy of it back"):
        open_database(f"sqlite:///{file}")


@pytest.mark.parametrize("may_create", [True, False])
def test_a_file_with_damaged_pages_is_not_called_an_older_one(
    *, may_create: bool, tmp_path: Path
) -> None:
    file = tmp_path / "store.sqlite3"
    open_database(f"sqlite:///{file}").dispose()
    content = bytearray(file.read_bytes())
    for page in range(2**14, len(content), 2**14):
        content[page : page + 64] = b"\xff" * 64
    file.write_bytes(content)

    with pytest.raises(StoreFailed, match="malformed; put a copy of it back"):
        open_database(f"sqlite:///{file}", may_create=may_create)


@pytest.mark.parametrize("may_create", [True, False])
@pytest.mark.parametrize("table", ["trials", "alembic_version", "verdicts", "workers", "jobs"])
def test_a_file_without_one_of_its_tables_is_damaged(
    table: str, *, may_create: bool, tmp_path: Path
) -> None:
    file = tmp_path / "store.sqlite3"
    open_database(f"sqlite:///{file}").dispose()
    with closing(sqlite3.connect(file)) as changed:
        changed.execute(f"DROP TABLE {table}")

    with pytest.raises(StoreFailed, match=f"is damaged, it has no table {table} any more; put"):
        open_database(f"sqlite:///{file}", may_create=may_create)


@pytest.mark.parametrize("may_create", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE alembic_version SET version_num = ''",
        "DELETE FROM alembic_version",
        "INSERT INTO alembic_version VALUES ('initial')",
    ],
)
def test_a_database_that_does_not_say_its_schema_is_damaged(
    change: str, *, may_create: bool, database_url: str
) -> None:
    engine = open_database(database_url)
    with engine.begin() as connection:
        connection.exec_driver_sql(change)
    engine.dispose()

    with pytest.raises(StoreFailed, match="is damaged, it does not say which schema it has; put"):
        open_database(database_url, may_create=may_create)


def test_a_table_that_is_lost_meanwhile_asks_for_a_backup(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite3"
    engine = open_database(f"sqlite:///{file}")
    with closing(sqlite3.connect(file)) as changed:
        changed.execute("DROP TABLE trials")

    with pytest.raises(
        StoreFailed, match=f"no such table: trials; .*{file} is damaged: put a copy"
    ):
        Repository(engine).trials()
    engine.dispose()


def test_a_quorum_of_another_type_is_damage(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/store.sqlite3")
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE verdict_state SET quorum = x'ff00'")

    with pytest.raises(RowsDamaged):
        Repository(engine).quorum()
    engine.dispose()
