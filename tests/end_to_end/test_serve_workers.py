"""A service has workers beside it: they are replaced when they die, and end with it."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from fleet_parts import CALMED
from served import keep_trial
from working import PATIENCE_S, PROBLEM, ask_for, job_now, wait_until

from gemm_tuner.build.compile import Build
from gemm_tuner.cli import worker_processes
from gemm_tuner.cli.worker_processes import WorkerProcesses
from gemm_tuner.domain.job import JobState
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database


def workers_of(parent: int) -> set[int]:
    """Return the processes that run jobs beside a service."""
    found = set()
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"\0worker\0" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.add(int(child))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.sqlite3"


@pytest.fixture
def jobs(url: str) -> Iterator[Jobs]:
    engine = open_database(url)
    yield Jobs(engine)
    engine.dispose()


def is_any_there(jobs: Jobs) -> bool:
    return jobs.has_worker(detect_cpu().class_key, datetime.now(UTC))


@contextmanager
def serving(
    tmp_path: Path, url: str, *options: str, **variables: str
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a service, and yield its process and its address."""
    environment = {name: text for name, text in os.environ.items() if name != "GEMM_TUNER_WORKERS"}
    environment["PYTHONPATH"] = f"{CALMED}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "gemm_tuner", "serve", "--port", "0", "--db", url]
    log = tmp_path / "log"
    with (
        log.open("w") as stream,
        subprocess.Popen(
            [*command, "--key", str(tmp_path / "key.pem"), *options],
            stderr=stream,
            text=True,
            env=environment | variables,
        ) as process,
    ):
        try:
            wait_until(lambda: "Answers are signed" in log.read_text())
            yield process, log.read_text().partition("Serving at ")[2].partition(";")[0]
        finally:
            process.terminate()


def test_what_is_asked_of_a_service_is_tuned_and_then_answered(
    tmp_path: Path, url: str, jobs: Jobs
) -> None:
    with serving(tmp_path, url) as (_process, address):
        job = ask_for(jobs)
        wait_until(lambda: job_now(jobs, job).state.is_over)
        answer = httpx.post(
            f"{address}/v1/resolve", json={"problem": PROBLEM.text}, timeout=60, trust_env=False
        )

    over = job_now(jobs, job)
    verdict = answer.raise_for_status().json()["verdict"]
    assert over.state is JobState.DONE, over.detail
    assert verdict["basis"] == "measured"
    assert over.detail.startswith(f"{verdict['decision']}: ")
    log = (tmp_path / "log").read_text()
    assert f"Job {job.id[:8]} done: {over.detail}" in log


def test_a_service_without_workers_tunes_nothing(tmp_path: Path, url: str, jobs: Jobs) -> None:
    with serving(tmp_path, url, "--workers", "0") as (process, address):
        job = ask_for(jobs)
        for _request in range(3):
            httpx.get(f"{address}/healthz", timeout=60, trust_env=False).raise_for_status()
        assert workers_of(process.pid) == set()

    assert job_now(jobs, job) == job
    assert not is_any_there(jobs)


@pytest.mark.proof
def test_a_quorum_holds_in_all_processes_from_the_start_on(
    tmp_path: Path, url: str, build: Build
) -> None:
    engine = open_database(url)
    keep_trial(Repository(engine), build, cpu=detect_cpu(), speed=10)
    engine.dispose()

    def decisions(*options: str) -> set[str]:
        with serving(tmp_path, url, "--workers", "0", *options) as (_process, address):
            answers = [
                httpx.post(
                    f"{address}/v1/resolve",
                    json={"problem": PROBLEM.text},
                    timeout=60,
                    trust_env=False,
                )
                for _connection in range(16)
            ]
        return {one.raise_for_status().json()["verdict"]["decision"] for one in answers}

    several = ("--processes", "2")
    assert decisions(*several) == {"tuned"}
    assert decisions("--quorum", "2", *several) == {"tie"}
    assert "The quorum was 1, and is 2 now" in (tmp_path / "log").read_text()
    assert decisions(*several) == {"tuned"}


@pytest.mark.proof
def test_a_worker_that_dies_is_replaced(tmp_path: Path, url: str, jobs: Jobs) -> None:
    with serving(tmp_path, url) as (process, _address):
        wait_until(lambda: is_any_there(jobs))
        (first,) = workers_of(process.pid)

        os.kill(first, signal.SIGKILL)

        wait_until(lambda: bool(workers_of(process.pid) - {first}))
        job = ask_for(jobs)
        wait_until(lambda: job_now(jobs, job).state.is_over)
    assert "A worker ended (SIGKILL); the next one starts in 1 s." in (tmp_path / "log").read_text()


@pytest.mark.proof
@pytest.mark.parametrize(
    "way",
    [
        signal.SIGTERM,
        *(pytest.param(one, marks=pytest.mark.proof) for one in (signal.SIGINT, signal.SIGKILL)),
    ],
)
def test_no_worker_is_left(tmp_path: Path, url: str, jobs: Jobs, way: signal.Signals) -> None:
    job = ask_for(jobs, budget_s=600.0)
    with serving(tmp_path, url, "--workers", "2") as (process, _address):
        wait_until(lambda: job_now(jobs, job).state is JobState.RUNNING)
        pids = workers_of(process.pid)
        assert len(pids) == 2

        process.send_signal(way)
        process.wait(PATIENCE_S)
        wait_until(lambda: not any(map(is_alive, pids)))

    waiting = job_now(jobs, job)
    assert (waiting.state, waiting.attempts) == (JobState.WAITING, 0)
    assert not is_any_there(jobs)


def test_a_machine_without_a_compiler_serves_and_says_why_it_tunes_nothing(
    tmp_path: Path, url: str, jobs: Jobs
) -> None:
    with serving(tmp_path, url, GEMM_TUNER_COMPILER="clang", PATH="/nowhere") as (process, _at):
        wait_until(lambda: "Warning" in (tmp_path / "log").read_text())
        assert workers_of(process.pid) == set()

    assert "no worker runs, so what is asked for waits" in (tmp_path / "log").read_text()
    assert not is_any_there(jobs)


def test_workers_that_always_die_are_not_started_for_ever(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = shutil.which("false")
    assert failing is not None
    monkeypatch.setattr(sys, "executable", failing)
    monkeypatch.setattr(worker_processes, "_FIRST_PAUSE_S", 0.001)
    told: list[str] = []

    with WorkerProcesses(1, url, tell=told.append):
        wait_until(lambda: len(told) == 11)

    assert told[0] == "A worker ended (exit code 1); the next one starts in 0.001 s."
    assert told[1].endswith("starts in 0.002 s.")
    assert told[10] == "10 workers ended one after the other; none is started any more."
