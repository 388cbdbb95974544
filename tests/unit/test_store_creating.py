"""A new database gets at once what migrations would make step by step."""

import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from databases import Databases
from migrating import upgrade
from restricted import full_disk
from samples import make_trial
from sqlalchemy import Connection, Engine, create_engine, inspect, text

from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import is_current, open_database, writing
from gemm_tuner.store.sql.tables import METADATA

_OPEN = """
import sys
from gemm_tuner.store.sql.database import open_database
open_database(sys.argv[1]).dispose()
print(*sys.modules)
"""
# What else a server may have: none of it is in the schema.
_OF_POSTGRESQL = (
    "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal",
    "SELECT typname FROM pg_type WHERE typtype = 'e' AND typnamespace = 'public'::regnamespace",
    "SELECT viewname FROM pg_views WHERE schemaname = 'public'",
)


@contextmanager
def opened(url: str) -> Iterator[Engine]:
    engine = open_database(url)
    try:
        yield engine
    finally:
        engine.dispose()


@pytest.fixture
def migrated_url(databases: Databases) -> Iterator[str]:
    """Yield a database that migrations made."""
    with databases.empty() as url:
        if url.startswith("sqlite"):
            Path(url.removeprefix("sqlite:///")).parent.mkdir()
        engine = create_engine(url)
        with engine.begin() as connection:
            upgrade(connection)
        engine.dispose()
        yield url


def schema_of(engine: Engine) -> dict[str, object]:
    """Return all that a database has, by name: the order of columns says nothing."""
    inspector = inspect(engine)
    ask: tuple[Callable[[str], object], ...] = (
        inspector.get_columns,
        inspector.get_foreign_keys,
        inspector.get_indexes,
        inspector.get_unique_constraints,
        inspector.get_check_constraints,
    )
    found: dict[str, object] = {}
    for table in inspector.get_table_names():
        found[table] = [inspector.get_pk_constraint(table)]
        found[table] += [sorted(map(str, one(table))) for one in ask]  # type: ignore[call-overload, operator]
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            found["sequences"] = sorted(inspector.get_sequence_names())
            found |= {one: connection.scalars(text(one)).all() for one in _OF_POSTGRESQL}
        else:
            statement = "SELECT type, name, sql FROM sqlite_master"
            for kind, name, sql in connection.exec_driver_sql(statement):
                found[f"{kind} {name}"] = _parts_of(sql or "")
    return found


def _parts_of(sql: str) -> list[str]:
    """Return what a statement of SQLite lists, sorted, without its quotes and spaces."""
    plain = " ".join(sql.replace('"', "").split()).replace("( ", "(").replace(" )", ")")
    before, _bracket, listed = plain.partition("(")
    parts = re.split(r",\s*(?![^(]*\))", listed.removesuffix(")"))
    return [before.strip(), *sorted(part.strip() for part in parts)]


def rows_of(engine: Engine) -> dict[str, object]:
    """Return every row of a database, without the random count of changes."""
    with engine.connect() as connection:
        rows: dict[str, object] = {
            name: connection.execute(table.select()).all()
            for name, table in METADATA.tables.items()
        }
        state = text("SELECT id, rules, quorum FROM verdict_state")
        version = text("SELECT * FROM alembic_version")
        return rows | {
            "verdict_state": connection.execute(state).all(),
            "alembic_version": connection.execute(version).all(),
        }


def test_a_new_database_is_as_migrations_make_it(empty_url: str, migrated_url: str) -> None:
    with opened(empty_url) as new, opened(migrated_url) as migrated:
        assert is_current(new)
        schemas = [schema_of(engine) for engine in (new, migrated)]
        rows = [rows_of(engine) for engine in (new, migrated)]

    assert schemas[0] == schemas[1]
    assert rows[0] == rows[1]


def test_migrations_make_the_tables_of_the_models(migrated_url: str) -> None:
    with opened(migrated_url) as engine, engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), METADATA)

    assert differences == []


def test_a_new_database_loads_neither_alembic_nor_what_reads_trials(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _OPEN, f"sqlite:///{tmp_path}/store.sqlite3"]
    modules = subprocess.run(command, capture_output=True, check=True).stdout.decode().split()

    assert not {"alembic", "gemm_tuner.store.verdicts.deriving"} & set(modules)


def test_who_is_stopped_while_it_creates_leaves_nothing(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(connection: Connection, _revision: str) -> None:
        METADATA.create_all(connection)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gemm_tuner.store.sql.database.create_schema", stop)
        with pytest.raises(KeyboardInterrupt):
            open_database(empty_url)

    with opened(empty_url) as engine:
        assert is_current(engine)


def test_who_finds_that_another_created_it_meanwhile_keeps_it(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(database_url) as first:
        Repository(first).add_trial(make_trial())
        before = rows_of(first)

    monkeypatch.setattr("gemm_tuner.store.sql.database.is_current", lambda _engine: False)

    with opened(database_url) as second:
        assert rows_of(second) == before


def test_tables_of_others_stay_beside(empty_url: str) -> None:
    with opened(empty_url) as engine, writing(engine).begin() as connection:
        METADATA.drop_all(connection)
        connection.exec_driver_sql("DROP TABLE alembic_version")
        connection.exec_driver_sql("CREATE TABLE places (name TEXT)")

    if empty_url.startswith("sqlite"):  # a file is one program's, a server may be shared
        with pytest.raises(StoreFailed, match="but tables of another program; name another"):
            open_database(empty_url)
        return
    with opened(empty_url) as engine:
        assert is_current(engine)
        assert "places" in inspect(engine).get_table_names()


@pytest.mark.parametrize(
    "tables", ["places", "jobs", "alembic_version", "alembic_version trials", "view_of_places"]
)
def test_a_file_of_another_program_is_refused_and_stays(tables: str, tmp_path: Path) -> None:
    path = tmp_path / "places.sqlite3"
    with closing(sqlite3.connect(path)) as foreign:
        for table in tables.split():
            kind = "VIEW" if table.startswith("view") else "TABLE"
            foreign.execute(f"CREATE {kind} {table} AS SELECT 'abc' AS version_num")
        foreign.commit()
    before = path.read_bytes()

    with pytest.raises(StoreFailed, match=r"places\.sqlite3 holds .*but tables of another program"):
        open_database(f"sqlite:///{path}")

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_without_tables_becomes_a_database(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with closing(sqlite3.connect(tmp_path / "used")) as used:
        used.execute("CREATE TABLE places (name TEXT)")
        used.execute("DROP TABLE places")

    for name in ("empty", "used"):
        with opened(f"sqlite:///{tmp_path}/{name}") as engine:
            assert is_current(engine)


def test_a_disk_that_is_full_meanwhile_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    with full_disk(2**16), pytest.raises(StoreFailed, match=r"disk I/O error|disk is full"):
        open_database(url)

    with opened(url) as engine:
        assert is_current(engine)
