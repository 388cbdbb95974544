"""A fleet places jobs on machines of their class, by TLS, and outlives its scheduler."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from certificates import make_identity
from fleet_parts import CALMED, FleetParts, Part
from postgres import find_programs
from served import keep_trial
from working import PROBLEM, ask_for, job_now, wait_until

from gemm_tuner.build.compile import Build
from gemm_tuner.domain.cpu import Cpu, parse_isa
from gemm_tuner.domain.job import JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.trust.attestation import MeasuringKeys

pytestmark = [
    pytest.mark.proof,
    pytest.mark.long,
    pytest.mark.skipif(
        find_spec("distributed") is None, reason='the extra "fleet" is not installed'
    ),
]

_LESS = "fma,f16c"  # a second class of CPUs, on the same machine
_JOINED = "It belongs to the fleet"


def with_less() -> Cpu:
    """Return the CPU that a worker with fewer features has."""
    return replace(detect_cpu(), isa=detect_cpu().isa & parse_isa(_LESS.split(",")))


@dataclass
class Fleet:
    """A fleet of two classes, whose parts a test starts."""

    parts: FleetParts
    jobs: Jobs
    repository: Repository
    stack: ExitStack

    def started(self, part: Part) -> Part:
        """Start a part, which is ended with the test."""
        self.stack.callback(part.kill)
        part.start()
        return part

    def joined(self, name: str, **variables: str) -> Part:
        """Start a worker, and return it when it belongs to the fleet."""
        worker = self.started(self.parts.worker(name, **variables))
        worker.wait_for(_JOINED)
        return worker


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    engine = open_database(url)
    parts = FleetParts(
        # No job waits for a lease to end, which a busy machine may be late to renew.
        folder=tmp_path,
        database_url=url,
        tls=make_identity(tmp_path / "tls"),
        lease_s=60.0,
    )
    with ExitStack() as stack:
        yield Fleet(parts, Jobs(engine), Repository(engine), stack)
    engine.dispose()


def test_a_job_reaches_only_the_worker_of_its_class(fleet: Fleet, tmp_path: Path) -> None:
    fleet.started(fleet.parts.scheduler())
    fleet.started(fleet.parts.dispatcher())
    whole = fleet.joined("whole")
    less = fleet.joined("less", GEMM_TUNER_ISA=_LESS)
    here = ask_for(fleet.jobs)
    there, _is_new = fleet.jobs.submit(
        PROBLEM,
        class_key=with_less().class_key,
        context=here.context,
        budget_s=1.0,
        priority=0,
        owner="me",
        idempotency_key=None,
        now=datetime.now(UTC),
    )

    wait_until(lambda: job_now(fleet.jobs, here).state.is_over)
    wait_until(lambda: job_now(fleet.jobs, there).state.is_over)

    for job in (here, there):
        assert job_now(fleet.jobs, job).state is JobState.DONE, job_now(fleet.jobs, job).detail
    whole.wait_for(f"Job {here.id[:8]} done")
    less.wait_for(f"Job {there.id[:8]} done")
    assert here.id[:8] not in less.said()
    assert there.id[:8] not in whole.said()
    tried = {trial.cpu.class_key for trial in fleet.repository.trials(problem=PROBLEM)}
    assert tried == {here.class_key, there.class_key}
    check_who_shows_no_certificate_is_not_spoken_to(fleet, tmp_path)
    assert whole.is_running
    assert less.is_running


def test_a_job_goes_on_while_the_scheduler_is_away_and_the_worker_comes_back(fleet: Fleet) -> None:
    scheduler = fleet.started(fleet.parts.scheduler())
    dispatcher = fleet.started(fleet.parts.dispatcher())
    worker = fleet.joined("whole")
    first = ask_for(fleet.jobs, Problem.parse("f32 64x256x256 nk bias+relu"), budget_s=5.0)
    wait_until(lambda: job_now(fleet.jobs, first).progress.tried > 0)

    scheduler.kill()
    wait_until(lambda: job_now(fleet.jobs, first).state.is_over)
    scheduler.start()
    second = ask_for(fleet.jobs)
    wait_until(lambda: job_now(fleet.jobs, second).state.is_over)

    assert job_now(fleet.jobs, first).attempts == 1
    assert worker.said().count(_JOINED) == 2
    assert "Waiting until it can go on: the connection to the scheduler" in worker.said()
    for part in (worker, dispatcher):
        assert "Traceback" not in part.said()
    worker.kill(signal.SIGTERM)
    assert not fleet.jobs.has_worker(detect_cpu().class_key, datetime.now(UTC))


def test_a_sweep_spreads_layers_over_classes_and_is_resumed(fleet: Fleet, tmp_path: Path) -> None:
    layers = tmp_path / "layers.csv"
    layers.write_text("name,m,n,k\nfirst,8,32,16\nsecond,4,16,16\n")
    fleet.started(fleet.parts.scheduler())
    fleet.joined("whole")
    fleet.joined("less", GEMM_TUNER_ISA=_LESS)
    arguments = ("--shapes", str(layers), "--budget", "60s")
    sweep = fleet.started(fleet.parts.sweep(*arguments))
    wait_until(lambda: any(job.progress.tried for job in fleet.jobs.newest(9)))

    sweep.kill(signal.SIGINT)
    assert "run the same command again to resume" in sweep.said()
    assert all(job.state is JobState.CANCELLED for job in fleet.jobs.newest(9))
    before = len(fleet.repository.trials())
    assert before
    sweep = fleet.parts.sweep("--shapes", str(layers), "--budget", "1s")
    sweep.start()
    wait_until(lambda: not sweep.is_running)

    said = sweep.said()
    assert "4 of 4 jobs over" in said
    assert "left" in said
    done = [job for job in fleet.jobs.newest(9) if job.state is JobState.DONE]
    assert {(job.problem.m.high, job.class_key) for job in done} == {
        (m, cpu.class_key) for m in (8, 4) for cpu in (detect_cpu(), with_less())
    }


def test_the_example_shows_it_in_one_command() -> None:
    if find_programs() is None:
        pytest.skip("no PostgreSQL server is installed: apt install postgresql")
    example = Path(__file__).parents[2] / "examples" / "fleet.py"

    done = subprocess.run(
        [sys.executable, str(example)],
        env={**os.environ, "PYTHONPATH": str(CALMED)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "it was run by: second worker" in done.stdout
    assert "served: " in done.stdout
    assert "every element is within its error bound" in done.stdout


def check_who_shows_no_certificate_is_not_spoken_to(fleet: Fleet, folder: Path) -> None:
    strangers = replace(fleet.parts, tls=make_identity(folder / "strangers"))
    object.__setattr__(strangers, "port", fleet.parts.port)

    refused = subprocess.run(
        [sys.executable, "-m", "gemm_tuner", "sweep", "8", "8", "8", *strangers.joining],
        env={**os.environ, "GEMM_TUNER_DB": fleet.parts.database_url},
        capture_output=True,
        text=True,
        check=False,
    )

    assert refused.returncode == 3
    assert "does not answer" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_quorum_is_reached_on_the_worker_that_did_not_measure(fleet: Fleet, build: Build) -> None:
    names = ("one", "two")
    keys = {name: MeasuringKeys(fleet.parts.data_of(name) / "gemm-tuner") for name in names}
    for name, other in (names, names[::-1]):
        keys[name].accept(keys[other].own_made())
        MeasuringKeys().accept(keys[name].own_made())
    fleet.repository.require_quorum(2)
    engine = open_database(fleet.parts.database_url)
    keep_trial(Repository(engine, keys["one"]), build, cpu=detect_cpu(), speed=10)
    engine.dispose()
    job = ask_for(fleet.jobs)
    assert job.measured_by == {keys["one"].own_made()}
    fleet.started(fleet.parts.scheduler())
    fleet.started(fleet.parts.dispatcher())
    one, fresh = fleet.joined("one"), ask_for(fleet.jobs, Problem.parse("f32 4x16x16 nk none"))
    wait_until(lambda: job_now(fleet.jobs, fresh).state.is_over)
    assert job_now(fleet.jobs, job).state is JobState.WAITING

    two = fleet.joined("two")
    wait_until(lambda: job_now(fleet.jobs, job).state.is_over)

    two.wait_for(f"Job {job.id[:8]} done")
    assert job.id[:8] not in one.said()
    found = fleet.repository.attested_trials(problem=PROBLEM)
    assert {trial.key for trial in found} == {key.own_made() for key in keys.values()}
