"""Jobs of a fleet whose parts are killed at random moments: each ends, and none is lost.

    FLEET_JOBS=20 FLEET_SEEDS=5 pytest -m proof tests/end_to_end/test_fleet_faults.py

Each seed kills each part once: the service, the scheduler, the dispatcher and PostgreSQL at any
moment, and a worker before its first trial, in the race and among the finalists.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from certificates import make_identity
from fleet_parts import FleetParts, Part
from postgres import PostgresServer, find_programs, postgres_server

from gemm_tuner.derive import is_believed
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.errors import StoreFailed
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.jobs.views import JobViews
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.wire.record import WireCpu
from gemm_tuner.tuning.result import last_final
from gemm_tuner.tuning.sampling import is_slower_than_before

pytestmark = [
    pytest.mark.proof,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("distributed") is None, reason='the extra "fleet" is not installed'
    ),
    # The transport leaves the socket of a refused connection to the collector.
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
    ),
]

JOBS = int(os.environ.get("FLEET_JOBS", "12"))
SEEDS = int(os.environ.get("FLEET_SEEDS", "1"))
BUDGET_S = 0.5
LEASE_S = 6.0
LONGEST_S = 800.0
RESTART_S = 1.0
LOOK_S, LOOK_AT_ALL_S = 0.05, 1.0
# A second class of CPUs, on the same machine: with vectors of 256 bits, or none.
LESS = "avx2,fma,f16c" if detect_cpu().isa_key in {"avx512", "amx"} else "fma,f16c"

Phase = Callable[[list[Trial]], bool]
PHASES: dict[str, Phase] = {
    "before its first trial": lambda trials: not trials,
    "in the race": lambda trials: {one.stage for one in trials} == {Stage.RACE},
    "among the finalists": lambda trials: any(one.stage is not Stage.RACE for one in trials),
}


@dataclass
class Faults:
    """A fleet on PostgreSQL, and what happens to it."""

    parts: FleetParts
    server: PostgresServer
    jobs: Jobs
    views: JobViews
    repository: Repository
    dice: random.Random
    by_name: dict[str, Part] = field(default_factory=dict)
    ids: dict[int, str] = field(default_factory=dict)  # of the jobs, by their number
    to_start: dict[str, float] = field(default_factory=dict)
    next_kill_s: float = 0.0
    log: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def start_all(self, stack: ExitStack) -> None:
        """Start all parts."""
        parts = (self.parts.scheduler(), self.parts.service(), self.parts.dispatcher())
        workers = (self.parts.worker("whole"), self.parts.worker("less", GEMM_TUNER_ISA=LESS))
        for part in (*parts, *workers):
            self.by_name[part.name] = part
            stack.callback(part.kill)
            part.start()

    def run(self, classes: tuple[Cpu, Cpu]) -> None:
        """Ask for the jobs, kill each part, and return when all is over."""
        kills = ["service", "scheduler", "dispatcher", "postgres", *PHASES]
        self.dice.shuffle(kills)
        look_s = 0.0
        while True:
            if len(self.ids) == JOBS and not kills and time.monotonic() > look_s:
                if self.are_over():
                    return
                look_s = time.monotonic() + LOOK_AT_ALL_S
            assert time.monotonic() - self.began_s < LONGEST_S, "\n".join(self.log)
            self.ask(classes)
            self.start_again()
            if kills and time.monotonic() > self.next_kill_s and self.kill(kills[0]):
                del kills[0]
                self.next_kill_s = time.monotonic() + self.dice.uniform(0.5, 3)
            time.sleep(LOOK_S)

    def ask(self, classes: tuple[Cpu, Cpu]) -> None:
        """Ask the service for the next job, until it answers."""
        number = len(self.ids)
        if number == JOBS:
            return
        cpu = WireCpu.of(classes[number % 2]).model_dump(mode="json")
        body = {"problem": f"f32 {1 + number}x16x32 nk relu", "cpu": cpu, "budget_s": BUDGET_S}
        transport = httpx.HTTPTransport(uds=str(self.parts.socket_path))
        with suppress(httpx.TransportError), httpx.Client(transport=transport, timeout=5) as client:
            headers = {"Idempotency-Key": f"job {number}"}
            answer = client.post("http://x/v1/jobs", json=body, headers=headers)
            assert answer.status_code in {200, 202, 500, 503}, answer.text
            if answer.is_success:
                self.ids[number] = answer.json()["id"]

    def kill(self, what: str) -> bool:
        """Kill a part, and return whether this was the moment for it."""
        if what in PHASES:
            return self.kill_worker(what)
        if what == "postgres":
            self.server.stop(signal.SIGQUIT)
        else:
            self.by_name[what].kill()
        self.note(what)
        return True

    def kill_worker(self, phase: str) -> bool:
        """Kill a worker in a phase of a job, if there is one now that lost no worker before."""
        with suppress(StoreFailed):
            for job in self.jobs.newest(JOBS, state=JobState.RUNNING):
                trials = self.repository.trials(problem=job.problem, class_key=job.class_key)
                if job.attempts == 1 and PHASES[phase](list(trials)):
                    pid = int(str(job.worker).split("-")[-2])
                    for part in self.by_name.values():
                        if part.is_running and part.pid == pid:
                            part.kill()
                            self.note(part.name, f"{phase} of {job.problem.text}")
                            return True
        return False

    def note(self, name: str, how: str = "") -> None:
        """Note a kill, and when the part starts again."""
        now_s = time.monotonic()
        self.to_start[name] = now_s + self.dice.uniform(0.2, 2)
        self.log.append(f"{now_s - self.began_s:5.1f} s: killed {name} {how}".rstrip())

    def start_again(self) -> None:
        """Start the parts whose time it is, and as a supervisor those that ended by themselves.

        A part that is started while the database is away says so, and ends.
        """
        for name, part in self.by_name.items():
            if not part.is_running:
                self.to_start.setdefault(name, time.monotonic() + RESTART_S)
        for name, at_s in tuple(self.to_start.items()):
            if time.monotonic() > at_s:
                del self.to_start[name]
                if name == "postgres":
                    self.server.start()
                else:
                    self.by_name[name].start()

    def are_over(self) -> bool:
        """Return whether all jobs are over, as far as that can be said now."""
        with suppress(StoreFailed):
            return all(job.state.is_over for job in self.found().values())
        return False

    def found(self) -> dict[str, Job]:
        """Return the jobs, by their ids."""
        found = self.views.several(tuple(self.ids.values()))
        return {key: job for key, job in found.items() if isinstance(job, Job)}


@pytest.fixture
def faults(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Faults]:
    programs = find_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed: apt install postgresql")
    with ExitStack() as stack:
        server = stack.enter_context(postgres_server(programs, is_durable=True))
        server.run_sql("CREATE DATABASE fleet")
        engine = open_database(server.url("fleet"))
        stack.callback(engine.dispose)
        found = Faults(
            parts=FleetParts(
                folder=tmp_path,
                database_url=server.url("fleet"),
                tls=make_identity(tmp_path / "tls"),
                lease_s=LEASE_S,
            ),
            server=server,
            jobs=Jobs(engine),
            views=JobViews(engine),
            repository=Repository(engine),
            dice=random.Random(request.getfixturevalue("seed")),
        )
        found.start_all(stack)
        yield found


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_job_ends_and_no_trial_is_measured_twice(
    seed: int, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = detect_cpu()
    with monkeypatch.context() as patch:
        patch.setenv("GEMM_TUNER_ISA", LESS)
        less = detect_cpu()

    faults.run((whole, less))

    took_s = time.monotonic() - faults.began_s
    told = "\n".join((f"seed {seed}: {took_s:.0f} s", *faults.log))
    print(told)  # noqa: T201 - what happened, for whoever runs it by hand
    jobs = faults.found()
    assert len(jobs) == len(faults.jobs.newest(1000)) == JOBS, told
    assert {one.id: one.detail for one in jobs.values() if one.state is not JobState.DONE} == {}
    for job in jobs.values():
        check_trials(job, faults.repository, told)
    for part in faults.by_name.values():
        if part.name != "scheduler":  # not ours
            assert "Traceback" not in part.said(), part.said()


def check_trials(job: Job, repository: Repository, told: str) -> None:
    """Check that nothing was proved or timed twice in a stage, and that a winner was confirmed.

    There is one final at most, in which all finalists share the samples of the baseline. What other
    work has disturbed is timed once more, by the rules of a sweep, and does not count.
    """
    problem = Problem.parse(job.problem.text)
    found = repository.trials(problem=problem, class_key=job.class_key)
    trials = [one for place, one in enumerate(found) if not _is_timed_again(place, found)]
    made = Counter(map(_what, trials))
    again = {what: times for what, times in made.items() if times > 1}
    assert not again, f"{job.problem.text}: {again}\n{told}"
    finalists = [one for one in trials if one.stage is Stage.FINAL]
    assert set(last_final(trials)) == set(finalists), f"{job.problem.text}: {finalists}\n{told}"
    assert any(one.stage is Stage.CONFIRM for one in trials), job.detail


def _what(one: Trial) -> tuple[str, str, str]:
    return one.candidate.text, "timed" if one.measurement else "proved", one.stage.value


def _is_timed_again(place: int, found: Sequence[Trial]) -> bool:
    """Return whether a final or confirmation was repeated by the rules of a sweep.

    A final of which any part was disturbed, or slower than before, is none: all that were timed in
    it are timed again, and so is what was confirmed after it.
    """
    one = found[place]
    if one.stage is Stage.RACE or _what(one) not in map(_what, found[place + 1 :]):
        return False
    finals = [other for other in found[: place + 1] if _is_timed(other, Stage.FINAL)]
    together = [
        at
        for at, other in enumerate(found)
        if finals and _is_timed(other, Stage.FINAL) and _first(other) == _first(finals[-1])
    ]
    return any(_is_disturbed(at, found) for at in (place, *together))


def _is_timed(one: Trial, stage: Stage) -> bool:
    return one.measurement is not None and one.stage is stage


def _first(one: Trial) -> float:
    """Return the first sample of the baseline, which all have that are timed together."""
    assert one.measurement is not None
    return one.measurement.baseline_timing.samples_ns[0]


def _is_disturbed(place: int, found: Sequence[Trial]) -> bool:
    one = found[place]
    if one.measurement is None:
        return False
    return not is_believed(one) or is_slower_than_before([one], found[:place])
