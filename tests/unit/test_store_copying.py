"""Copies, checks and backups of whole databases."""

import sqlite3
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest
from databases import Databases
from postgres import PostgresServer
from samples import (
    CONTEXT,
    CPU,
    PROBLEM,
    add_build,
    make_artifact,
    make_failed_trial,
    make_trial,
)
from sqlalchemy import Engine, delete, insert, select, update
from writers import start_writer, written_binary

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.record import SweepEnd
from gemm_tuner.store.audit import AuditLog
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.jobs.misses import Miss, Misses
from gemm_tuner.store.maintenance.checking import check_database
from gemm_tuner.store.maintenance.copying import CopyReport, CopyStep, DatabaseCopy
from gemm_tuner.store.maintenance.rows import stored_tables
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.revocations import RevocationLog
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.sql.tables import Origin, contributions, sources, trials
from gemm_tuner.store.tokens import Tokens

REVOKED = "ab" * 32
NOW = datetime(2026, 11, 23, tzinfo=UTC)
SWEEP = {"toolchain": "gcc 12.2.0", "generator": "0.1.0-aaaa"}


@pytest.fixture
def full(repository: Repository, engine: Engine) -> Engine:
    """Return a database with rows in each table; its trials have numbers with gaps."""
    add_build(repository)
    for minute in range(5):
        repository.add_trial(make_trial(minute=minute))
    with engine.begin() as connection:
        connection.execute(delete(trials).where(trials.c.sequence.in_([1, 3])))
        brought = {
            "sha256": sha256(b"brought").hexdigest(),
            "compressed": zlib.compress(b"brought"),
        }
        connection.execute(
            insert(contributions).values(owner="me", kind="records", size_bytes=7, **brought)
        )
    repository.add_imported([make_failed_trial(minute=9)])
    end = SweepEnd(baseline="onednn 3.2.0", is_exhausted=True, budget_s=30.0)
    repository.mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **SWEEP, end=end)
    RevocationLog(engine).revoke(REVOKED, reason="wrong", actor="me", now=NOW)
    Tokens(engine).create("a worker", {Scope.RESOLVE}, actor="me", now=NOW)
    Jobs(engine).submit(
        PROBLEM,
        class_key=CPU.class_key,
        context=CONTEXT,
        budget_s=30.0,
        priority=0,
        owner="me",
        idempotency_key="first",
        now=NOW,
    )
    Misses(engine).add({Miss(problem=PROBLEM, class_key="elsewhere", context=CONTEXT): 3}, NOW)
    return engine


@pytest.fixture
def empty(databases: Databases) -> Iterator[Engine]:
    """Yield a database of the same kind, with tables and no rows."""
    with databases.current() as url, opened(url) as engine:
        yield engine


@contextmanager
def opened(url: str) -> Iterator[Engine]:
    engine = open_database(url)
    yield engine
    engine.dispose()


def copy(source: Engine, target: Engine) -> CopyReport:
    return DatabaseCopy(source, target, lambda _step: None).run()


def rows_of(engine: Engine) -> dict[str, set[tuple[object, ...]]]:
    with engine.connect() as connection:
        return {
            table.name: {tuple(row) for row in connection.execute(select(table))}
            for table in stored_tables()
        }


def damages_of(engine: Engine) -> tuple[str, ...]:
    return check_database(engine, lambda *_told: None).damages


def test_a_copy_has_every_row_with_its_number(full: Engine, empty: Engine) -> None:
    report = copy(full, empty)

    wanted = rows_of(full)
    assert all(wanted.values()), "each table is tried"
    assert rows_of(empty) == wanted
    assert report.added == sum(map(len, wanted.values()))
    assert damages_of(empty) == ()


def test_a_second_copy_changes_nothing(full: Engine, empty: Engine) -> None:
    first = copy(full, empty)
    before = rows_of(empty)

    second = copy(full, empty)

    assert (second.added, second.known, second.left_out) == (0, first.added, ())
    assert rows_of(empty) == before


def test_a_copy_that_was_stopped_goes_on(
    full: Engine, empty: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.sql.scan.ROWS_AT_ONCE", 2)

    def stop(step: CopyStep) -> None:
        if step.table == "trials" and step.done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DatabaseCopy(full, empty, stop).run()
    report = copy(full, empty)

    assert report.known > 0
    assert rows_of(empty) == rows_of(full)


@pytest.mark.proof
def test_a_copy_goes_to_the_other_kind_and_back(
    full: Engine, postgres: PostgresServer, tmp_path: Path
) -> None:
    postgres.run_sql("CREATE DATABASE other TEMPLATE template0")
    try:
        with (
            opened(postgres.url("other")) as server,
            opened(f"sqlite:///{tmp_path}/back.sqlite3") as file,
        ):
            copy(full, server)
            copy(server, file)

            assert rows_of(server) == rows_of(full)
            assert rows_of(file) == rows_of(full)
            Repository(server).add_trial(make_trial(minute=100))
            assert len(Repository(server).trials()) == 4
    finally:
        postgres.run_sql("DROP DATABASE other WITH (FORCE)")


def _newest_trial(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT max(sequence) FROM trials").scalar_one())


def test_numbers_never_go_back_where_two_are_merged(full: Engine, empty: Engine) -> None:
    other = Repository(empty)
    for minute in range(20, 30):
        other.add_trial(make_trial(minute=minute))
    before = _newest_trial(empty)

    copy(full, empty)
    after = _newest_trial(empty)
    other.add_trial(make_trial(minute=200))

    assert after > before
    assert _newest_trial(empty) > after
    assert other.trials()[:10] == tuple(make_trial(minute=minute) for minute in range(20, 30))
    assert len(other.trials()) == 14
    assert other.trials(origin=Origin.IMPORTED) == (make_failed_trial(minute=9),)
    assert AuditLog(empty).newest(10) == AuditLog(full).newest(10)


def test_a_revocation_that_is_lifted_later_is_lifted_by_a_later_copy(
    full: Engine, empty: Engine
) -> None:
    copy(full, empty)
    assert RevocationLog(empty).revocations().artifacts == (REVOKED,)
    RevocationLog(full).lift(REVOKED, reason="right", actor="me", now=NOW)

    report = copy(full, empty)

    assert report.left_out == ()
    assert RevocationLog(empty).revocations().artifacts == ()


def test_what_the_target_alone_has_revoked_stays_revoked(full: Engine, empty: Engine) -> None:
    RevocationLog(full).lift(REVOKED, reason="right", actor="me", now=NOW)
    RevocationLog(empty).revoke(REVOKED, reason="wrong here too", actor="me", now=NOW)

    (left_out,) = copy(full, empty).left_out

    assert "for a reason of its own" in left_out
    assert RevocationLog(empty).revocations().artifacts == (REVOKED,)


def test_a_token_that_is_revoked_later_is_revoked_by_a_later_copy(
    full: Engine, empty: Engine
) -> None:
    copy(full, empty)
    (token,) = Tokens(full).all()
    Tokens(full).revoke(token.id, actor="me", now=NOW)

    copy(full, empty)
    copy(empty, full)

    assert Tokens(empty).all() == Tokens(full).all()
    assert Tokens(empty).all()[0].revoked_at == NOW


def test_a_copy_of_an_older_database_revives_no_token(full: Engine, empty: Engine) -> None:
    copy(full, empty)
    (token,) = Tokens(full).all()
    Tokens(full).revoke(token.id, actor="me", now=NOW)

    copy(empty, full)

    assert Tokens(full).all()[0].revoked_at == NOW


def test_services_see_at_once_what_a_copy_brought(full: Engine, empty: Engine) -> None:
    before = Repository(empty).changes()

    copy(full, empty)

    assert Repository(empty).changes() > before


def test_damaged_rows_are_left_out_with_what_refers_to_them(full: Engine, empty: Engine) -> None:
    with full.begin() as connection:
        connection.execute(update(sources).values(compressed_text=b"other"))

    report = copy(full, empty)

    assert len(report.left_out) == 2
    assert "it was damaged" in report.left_out[0]
    assert "sources left out" in report.left_out[1]
    assert damages_of(empty) == ()
    assert len(Repository(empty).trials()) == 3


@pytest.mark.parametrize(
    ("table", "column", "value", "told"),
    [
        ("trials", "document", "{}", "it was damaged"),
        ("problems", "document", '"f32 1x1x1"', "it was damaged"),
        ("cpus", "document", "{}", "it was damaged"),
        ("sources", "compressed_text", b"x", "it was damaged"),
        ("artifacts", "compressed_binary", b"x", "it was damaged"),
        ("artifacts", "document", "{}", "is of another"),
        ("contributions", "compressed", b"x", "it was damaged"),
        ("jobs", "problem", "f32 1x1x1", "it was damaged"),
        ("misses", "problem", "f32 1x1x1", "it was damaged"),
    ],
)
def test_a_check_names_what_is_damaged(
    full: Engine, table: str, column: str, value: str | bytes, told: str
) -> None:
    assert damages_of(full) == ()
    (changed,) = (each for each in stored_tables() if each.name == table)

    with full.begin() as connection:
        connection.execute(update(changed).values({column: value}))

    damages = damages_of(full)
    assert damages
    assert all(damage.startswith(f"{table} ") and told in damage for damage in damages)


def test_a_check_finds_what_refers_to_nothing(tmp_path: Path) -> None:
    with opened(f"sqlite:///{tmp_path}/store.sqlite3") as engine:
        add_build(Repository(engine))
        with closing(sqlite3.connect(f"{tmp_path}/store.sqlite3")) as other:
            other.execute("DELETE FROM sources")
            other.commit()

        (damage,) = damages_of(engine)

    assert damage.startswith(f"artifacts {make_artifact().sha256[:16]}: sources has no ")


def test_a_copy_beside_a_writer_is_whole(database_url: str, empty: Engine) -> None:
    writer = start_writer(database_url, 0, 1_000_000)
    assert writer.stdout is not None
    confirmed = [int(writer.stdout.readline()) for _ in range(5)]

    with opened(database_url) as source:
        copy(source, empty)
    writer.kill()
    writer.communicate()

    check_backup(empty, confirmed)


def check_backup(backup: Engine, confirmed: list[int]) -> None:
    repository = Repository(backup)
    assert damages_of(backup) == ()
    assert len(repository.trials()) >= len(confirmed)
    for minute in confirmed:
        assert repository.holds(make_artifact(written_binary(minute)))


def test_a_file_is_backed_up_by_sqlite_while_a_writer_writes(tmp_path: Path) -> None:
    url, backup = f"sqlite:///{tmp_path}/store.sqlite3", tmp_path / "backup.sqlite3"
    writer = start_writer(url, 0, 1_000_000)
    assert writer.stdout is not None
    confirmed = [int(writer.stdout.readline()) for _ in range(5)]

    with closing(sqlite3.connect(f"{tmp_path}/store.sqlite3")) as connection:
        connection.execute("VACUUM INTO ?", (str(backup),))
    writer.kill()
    writer.communicate()

    with opened(f"sqlite:///{backup}") as engine:
        check_backup(engine, confirmed)


@pytest.mark.proof
def test_a_server_is_backed_up_by_its_own_programs_while_a_writer_writes(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    for name in ("live", "restored"):
        postgres.run_sql(f"CREATE DATABASE {name} TEMPLATE template0")
    writer = start_writer(postgres.url("live"), 0, 1_000_000)
    assert writer.stdout is not None
    confirmed = [int(writer.stdout.readline()) for _ in range(5)]

    dump = str(tmp_path / "store.dump")
    subprocess.run(
        [postgres.program("pg_dump"), "-Fc", "-f", dump, postgres.url("live")], check=True
    )
    subprocess.run(
        [postgres.program("pg_restore"), "-d", postgres.url("restored"), dump], check=True
    )
    writer.kill()
    writer.communicate()

    with opened(postgres.url("restored")) as engine:
        check_backup(engine, confirmed)
        Repository(engine).add_trial(make_trial(minute=-1))
    for name in ("live", "restored"):
        postgres.run_sql(f"DROP DATABASE {name} WITH (FORCE)")
