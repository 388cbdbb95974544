"""Faults of processes and disks: nothing that was acknowledged is lost, nothing half is read."""

import os
import random
import signal
import subprocess
import tempfile

import pytest
from databases import Databases, programs
from postgres import PostgresServer, postgres_server
from restricted import small_disk
from samples import (
    CONTEXT,
    CPU,
    PROBLEM,
    add_build,
    make_artifact,
    make_failed_trial,
    make_trial,
)
from sqlalchemy import Engine
from writers import start_writer, written_binary

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.errors import StoreFailed
from gemm_tuner.select.choose import choose
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database


def check_kept(url: str, confirmed: list[int]) -> None:
    """Check that a store has what a writer told of, whole, and at most one thing more."""
    engine = open_database(url)
    repository = Repository(engine)
    kept = repository.trials()
    wanted = [
        make_trial(minute=minute, artifact=make_artifact(written_binary(minute)))
        for minute in confirmed
    ]
    assert list(kept[: len(confirmed)]) == wanted
    assert len(kept) - len(confirmed) in {0, 1}
    for trial in kept:
        assert trial.artifact is not None
        assert repository.holds(trial.artifact)
    engine.dispose()


def end(writer: subprocess.Popen[str]) -> tuple[list[int], str]:
    """Return what an ending writer still told on stdout, and its last words on stderr."""
    told, said = writer.communicate()
    return [int(line) for line in told.splitlines()], said


def test_kill_9_loses_nothing_that_was_added(database_url: str) -> None:
    writer = start_writer(database_url, 0, 1_000_000)
    assert writer.stdout is not None

    confirmed = [int(writer.stdout.readline()) for _ in range(20)]
    os.kill(writer.pid, signal.SIGKILL)
    confirmed += end(writer)[0]

    assert writer.returncode == -signal.SIGKILL
    check_kept(database_url, confirmed)


@pytest.mark.proof
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
def test_a_server_that_stops_loses_nothing_that_was_added(
    own_postgres: PostgresServer, how: signal.Signals
) -> None:
    own_postgres.run_sql("CREATE DATABASE fleet")
    writer = start_writer(own_postgres.url("fleet"), 0, 1_000_000)
    assert writer.stdout is not None

    confirmed = [int(writer.stdout.readline()) for _ in range(20)]
    own_postgres.stop(how)
    told, said = end(writer)
    own_postgres.start()

    assert said.splitlines()[-1].startswith("gemm_tuner.errors.StoreFailed: ")
    check_kept(own_postgres.url("fleet"), confirmed + told)


@pytest.mark.proof
def test_processes_create_and_write_one_database_at_once(empty_url: str) -> None:
    writers = [start_writer(empty_url, 100 * number, 100 * number + 15) for number in range(3)]
    for writer in writers:
        writer.communicate()

    assert [writer.returncode for writer in writers] == [0, 0, 0]
    engine = open_database(empty_url)
    assert len(Repository(engine).trials()) == 45
    engine.dispose()


def test_a_full_disk_refuses_what_is_new_and_keeps_the_rest(
    engine: Engine, databases: Databases
) -> None:
    repository = Repository(engine)
    seed = random.Random(0)
    added: list[Artifact] = []

    def add(count: int) -> None:
        for _number in range(count):
            artifact = add_build(repository, seed.randbytes(100_000))
            repository.add_trial(make_trial(minute=len(added), artifact=artifact))
            added.append(artifact)

    add(1)
    engine.dispose()  # a server bounds only connections that begin now
    with (
        databases.full_disk(2**21),
        pytest.raises(StoreFailed, match=r"disk I/O error|database or disk is full|too large"),
    ):
        add(100)
    engine.dispose()

    assert 1 < len(added) < 100
    assert [trial.artifact for trial in repository.trials()] == added
    assert all(map(repository.holds, added))
    add(1)
    assert len(repository.trials()) == len(added)


@pytest.mark.proof
def test_a_disk_without_space_loses_nothing_that_was_added_to_sqlite() -> None:
    with small_disk(2**23) as disk:
        url = f"sqlite:///{disk.folder}/store.sqlite3"
        open_database(url).dispose()
        disk.fill(2**19)

        told, said = end(start_writer(url, 0, 1_000_000))

        assert told
        assert said.splitlines()[-1].startswith("gemm_tuner.errors.StoreFailed: ")
        check_kept(url, told)
        disk.empty()
        assert end(start_writer(url, 1_000_000, 1_000_003))[0] == [1_000_000, 1_000_001, 1_000_002]


@pytest.mark.proof
def test_a_disk_without_space_loses_nothing_that_was_added_to_postgresql(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with small_disk(2**27) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk.folder))
        with postgres_server(programs(), is_durable=True) as server:
            server.run_sql("CREATE DATABASE fleet")
            open_database(server.url("fleet")).dispose()
            disk.fill(2**20)

            told, said = end(start_writer(server.url("fleet"), 0, 1_000_000))

            assert told
            assert said.splitlines()[-1].startswith("gemm_tuner.errors.StoreFailed: ")
            disk.empty()
            server.stop()  # it may have ended itself, where its log found no space
            server.start()
            check_kept(server.url("fleet"), told)


def _serial(repository: Repository) -> int:
    return choose(repository, PROBLEM, cpu=CPU, context=CONTEXT).serial


def test_a_clock_that_was_set_back_does_not_set_back_the_number(repository: Repository) -> None:
    repository.add_trial(make_trial(minute=10**6))
    before = _serial(repository)

    repository.add_trial(make_failed_trial(minute=-(10**6)))

    assert _serial(repository) > before
    assert [trial.created_at.year for trial in repository.trials()] == [2028, 2024]
