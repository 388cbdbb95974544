"""A database that is locked, full or restarted costs a worker time, and no job."""

import itertools
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from planted_times import plant_speeds
from postgres import PostgresServer
from restricted import small_disk
from sqlalchemy import Engine
from working import PROBLEM, ask_for, job_now, run_job, wait_until, work

from gemm_tuner.domain.job import JobState
from gemm_tuner.domain.verdict import Basis
from gemm_tuner.errors import StoreFailed
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.measuring_lock import MeasuringLock
from gemm_tuner.select.choose import choose
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning.job import Ending, JobRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A database, what lets it answer no more, and what mends it."""

    engine: Engine
    begin: Callable[[], None]
    end: Callable[[], None]


@contextmanager
def locked(url: str) -> Iterator[Outage]:
    engine = open_database(url)
    file = str(engine.url.database)
    with closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as other:
        yield Outage(
            engine=engine,
            begin=lambda: other.execute("BEGIN IMMEDIATE").close(),
            end=lambda: other.execute("ROLLBACK").close(),
        )
    engine.dispose()


@contextmanager
def full() -> Iterator[Outage]:
    with small_disk(2**24) as disk:
        engine = open_database(f"sqlite:///{disk.folder}/store.sqlite3")

        def is_filled() -> bool:
            try:
                disk.fill(0)
            except OSError:  # the worker took some of the space meanwhile
                return False
            return True

        yield Outage(engine=engine, begin=lambda: wait_until(is_filled), end=disk.empty)
        engine.dispose()


@contextmanager
def restarted(server: PostgresServer) -> Iterator[Outage]:
    server.run_sql("CREATE DATABASE fleet")
    engine = open_database(server.url("fleet"))
    yield Outage(engine=engine, begin=server.stop, end=server.start)
    engine.dispose()


@pytest.fixture(params=["locked", "full", pytest.param("restarted", marks=pytest.mark.proof)])
def outage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Outage]:
    monkeypatch.setattr("gemm_tuner.store.sql.sqlite.BUSY_TIMEOUT_MS", 300)
    ways: dict[str, Callable[[], AbstractContextManager[Outage]]] = {
        "locked": lambda: locked(f"sqlite:///{tmp_path}/store.sqlite3"),
        "full": full,
        "restarted": lambda: restarted(request.getfixturevalue("own_postgres")),
    }
    with ways[request.param]() as found:
        yield found


@pytest.mark.proof
def test_a_job_goes_on_after_an_outage(outage: Outage, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_speeds(monkeypatch, itertools.count(1.0, 0.05))
    jobs, repository = Jobs(outage.engine), Repository(outage.engine)
    job = ask_for(jobs, budget_s=600.0)
    told: list[str] = []
    is_over = threading.Event()
    worker = threading.Thread(
        target=work, args=(jobs, repository, is_over.is_set), kwargs={"tell": told.append}
    )
    worker.start()
    wait_until(lambda: job_now(jobs, job).progress.tried > 0)

    outage.begin()
    # What is short may still fit into a full disk: then only the trial could not be written.
    wait_until(lambda: any("check its disk" in line for line in told))
    outage.end()
    before = len(repository.trials())
    wait_until(lambda: len(repository.trials()) > before)
    assert job_now(jobs, job).attempts == 1, "the outage costs no attempt"
    jobs.cancel(job.id, datetime.now(UTC))
    wait_until(lambda: job_now(jobs, job).state.is_over)
    is_over.set()
    worker.join()

    verdict = choose(repository, PROBLEM, cpu=detect_cpu(), context=job.context).verdict
    assert job_now(jobs, job).state is JobState.CANCELLED
    assert verdict.basis is Basis.MEASURED
    assert sum(line.startswith("Waiting") for line in told) <= 1, "it is said once"


@pytest.mark.proof
def test_a_disk_that_takes_no_trial_costs_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile jobs that need less are run, and others measure."""
    plant_speeds(monkeypatch, itertools.repeat(2.0))
    engine = open_database(f"sqlite:///{tmp_path}/store.sqlite3")
    jobs, repository = Jobs(engine), Repository(engine)
    job = ask_for(jobs)
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path / "cache" / "kernels"))
    (tmp_path / "cache").write_text("in the way")
    start, passed_s = datetime.now(UTC), 0.0

    def sleep(seconds: float) -> None:
        nonlocal passed_s
        passed_s += seconds
        assert job_now(jobs, job).detail.startswith("the cache directory")
        other = MeasuringLock()
        assert other.acquire(), "it is free between the tries"
        other.release()
        if passed_s > 20:
            (tmp_path / "cache").unlink(missing_ok=True)

    told = run_job(
        jobs, repository, job, sleep=sleep, now=lambda: start + timedelta(seconds=passed_s)
    )

    over = job_now(jobs, job)
    assert (over.state, over.attempts) == (JobState.DONE, 1)
    assert 30 < passed_s < 35, "the pauses are of 1, 2, 4, 8 and 16 s"
    assert [line.split()[2] for line in told[1:]] == ["waiting:", "done:"], "it is said once"
    engine.dispose()


@pytest.mark.proof
def test_a_job_that_can_never_be_written_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, itertools.repeat(2.0))
    engine = open_database(f"sqlite:///{tmp_path}/store.sqlite3")
    jobs, repository = Jobs(engine), Repository(engine)
    first, second = ask_for(jobs), ask_for(jobs, replace(PROBLEM, n=24))
    start, passed_s, tries = datetime.now(UTC), 0.0, 0
    run = JobRun.run

    def run_unless_first(self: JobRun) -> Ending | None:
        nonlocal tries
        if self.held.job.id != first.id:
            return run(self)
        tries += 1
        raise StoreFailed("the database is locked; wait.") from OSError("locked")

    monkeypatch.setattr(JobRun, "run", run_unless_first)

    def sleep(seconds: float) -> None:
        nonlocal passed_s
        passed_s += max(seconds, 15.0)

    now = {"now": lambda: start + timedelta(seconds=passed_s)}
    run_job(jobs, repository, second, sleep=sleep, **now)
    assert (job_now(jobs, second).state, tries) == (JobState.DONE, 1)
    run_job(jobs, repository, first, sleep=sleep, **now)

    over = job_now(jobs, first)
    assert (over.state, over.detail) == (JobState.FAILED, "the database is locked; wait.")
    assert passed_s > 3000, "after an hour or so"
    engine.dispose()
