"""Workers tune what is asked of a service, one at a time, and lose nothing when they end."""

import itertools
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Any, cast

import pytest
from planted_times import plant_speeds
from sqlalchemy import Engine
from working import (
    PATIENCE_S,
    PROBLEM,
    ask_for,
    job_now,
    new_worker,
    run_job,
    wait_until,
    work,
)

from gemm_tuner.domain.job import Job, JobProgress, JobState
from gemm_tuner.domain.measurement import Interference
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.errors import StoreFailed
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.measuring_lock import MeasuringLock
from gemm_tuner.select.choose import choose
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.attempt import Attempts
from gemm_tuner.tuning.job import JobRun
from gemm_tuner.tuning.ranges.holding import HeldJob

# tests/unit/test_store_jobs.py gives back, and takes over, jobs on each kind of database, and
# test_fleet_faults.py kills workers on PostgreSQL.
_ON_SQLITE = pytest.mark.parametrize("databases", ["sqlite"], indirect=True, scope="session")

# The command, on a machine that looks idle.
_WORKER = """
import sys
from gemm_tuner.cli.main import main
from gemm_tuner.tuning import worker

worker.idle_cores = lambda: None
main(["worker", "--db", sys.argv[1]])
"""


@pytest.fixture
def jobs(engine: Engine) -> Jobs:
    return Jobs(engine)


@pytest.fixture
def repository(engine: Engine) -> Repository:
    return Repository(engine)


def test_what_is_asked_for_is_tuned_and_served(jobs: Jobs, repository: Repository) -> None:
    job = ask_for(jobs)

    told = run_job(jobs, repository, job)

    over = job_now(jobs, job)
    match = choose(repository, PROBLEM, cpu=detect_cpu(), context=job.context)
    assert (over.state, over.attempts) == (JobState.DONE, 1)
    assert match.verdict.basis is Basis.MEASURED
    assert match.verdict.ratio is not None
    decision, ratio = match.verdict.decision.value, match.verdict.ratio.median
    assert over.detail.startswith(f"{decision}: {ratio:.2f} times ")
    assert over.progress.tried > 1
    assert over.progress.over_baseline == ratio
    assert over.progress.best_ns is not None
    assert over.progress.seconds_left == 0.0
    assert told == [
        f"Job {job.id[:8]}: {PROBLEM.text}, threads 1, hot; at most 1 s of search.",
        f"Job {job.id[:8]} done: {over.detail}",
    ]
    assert not jobs.has_worker(job.class_key, datetime.now(UTC)), "it said that it ended"


def test_progress_is_told_while_a_job_runs(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, itertools.count(1.0, 0.05))
    job = ask_for(jobs, budget_s=600)
    seen: list[Job] = []

    def has_seen_it() -> bool:
        seen.append(job_now(jobs, job))
        return seen[-1].progress.over_baseline is not None and seen[-1].progress.tried > 1

    work(jobs, repository, has_seen_it)

    running = [one.progress for one in seen if one.state is JobState.RUNNING]
    assert [one.revision for one in seen] == sorted(one.revision for one in seen)
    assert running[-1].best_ns is not None
    assert running[-1].seconds_left is not None
    assert 0 < running[-1].seconds_left < 600


def test_the_time_left_runs_on_between_two_steps_of_a_sweep(jobs: Jobs) -> None:
    ask_for(jobs, budget_s=30)
    begin = datetime.now(UTC)
    job = jobs.claim("w", class_keys=(detect_cpu().class_key,), now=begin, lease_s=60)
    assert job is not None
    times = [begin, begin + timedelta(seconds=2), begin + timedelta(hours=1)]
    jobs.report(job.id, "w", JobProgress(tried=7, best_ns=9.0), begin, 60)
    job = job_now(jobs, job)
    held = HeldJob(job, jobs, worker="w", now=lambda: times[0], on_report=lambda: None)

    left = []
    for _time in range(len(times)):
        held.report()
        left.append(job_now(jobs, job).progress.seconds_left)
        times = times[1:] or times

    assert left == [30.0, 28.0, 0.0]
    kept = job_now(jobs, job).progress
    assert (kept.tried, kept.best_ns) == (7, 9.0), "what a worker told that was lost stands"


def test_a_stopped_worker_gives_its_job_back(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, itertools.count(1.0, 0.05))
    job = ask_for(jobs, budget_s=600)

    told = work(jobs, repository, lambda: job_now(jobs, job).progress.tried > 0)

    waiting = job_now(jobs, job)
    assert (waiting.state, waiting.attempts, waiting.worker) == (JobState.WAITING, 0, None)
    assert told[-1] == f"Job {job.id[:8]} waiting: its worker was stopped; another goes on"


def test_a_cancelled_job_keeps_the_best_so_far(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, itertools.count(1.0, 0.05))
    job = ask_for(jobs, budget_s=600)

    def cancel_when_something_is_known() -> None:
        wait_until(lambda: job_now(jobs, job).progress.over_baseline is not None)
        jobs.cancel(job.id, datetime.now(UTC))

    canceller = threading.Thread(target=cancel_when_something_is_known)
    canceller.start()
    run_job(jobs, repository, job)
    canceller.join()

    over = job_now(jobs, job)
    verdict = choose(repository, PROBLEM, cpu=detect_cpu(), context=job.context).verdict
    assert over.state is JobState.CANCELLED
    assert (verdict.basis, verdict.decision) == (Basis.MEASURED, Decision.TUNED)
    assert verdict.ratio is not None
    assert over.detail.startswith(f"cancelled; tuned: {verdict.ratio.median:.2f} times ")


@pytest.mark.parametrize(
    ("asked", "ending"),
    [
        ("_is_cancelled", "cancelled: cancelled before a kernel was timed"),
        ("_is_given_up", "waiting: its worker was stopped; another goes on"),
    ],
)
def test_nobody_waits_for_the_preparation_of_a_job_that_is_to_end(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch, asked: str, ending: str
) -> None:
    """To compute what a large problem gives exactly takes minutes, whatever the budget."""

    def prepared(**_named: object) -> None:
        raise AssertionError("it was prepared to its end")

    monkeypatch.setattr("gemm_tuner.tuning.sweep.Attempts", prepared)
    monkeypatch.setattr(JobRun, asked, property(lambda _run: True))
    job = ask_for(jobs)
    told: list[str] = []

    work(jobs, repository, lambda: len(told) > 1, tell=told.append)

    assert told[1] == f"Job {job.id[:8]} {ending}"


@pytest.mark.proof
def test_a_worker_that_lost_its_job_leaves_it_to_the_other(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, itertools.count(1.0, 0.05))
    job = ask_for(jobs, budget_s=600)
    told: list[str] = []

    def take_it_away() -> None:
        wait_until(lambda: job_now(jobs, job).progress.tried > 0)
        later = datetime.now(UTC) + timedelta(minutes=2)
        jobs.claim("other", class_keys=[job.class_key], now=later, lease_s=600)

    thief = threading.Thread(target=take_it_away)
    thief.start()
    work(jobs, repository, lambda: len(told) > 1, tell=told.append)
    thief.join()

    kept = job_now(jobs, job)
    assert told[1] == f"Job {job.id[:8]} is not run by this worker any more."
    assert (kept.state, kept.worker, kept.attempts) == (JobState.RUNNING, "other", 2)


def test_an_aborted_worker_gives_its_job_back(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def abort(*_arguments: object, **_named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gemm_tuner.tuning.job.sweep", abort)
    job = ask_for(jobs)

    with pytest.raises(KeyboardInterrupt):
        work(jobs, repository, lambda: False)

    waiting = job_now(jobs, job)
    assert (waiting.state, waiting.attempts, waiting.worker) == (JobState.WAITING, 0, None)
    assert not jobs.has_worker(job.class_key, datetime.now(UTC))


def test_a_job_whose_worker_was_lost_after_the_final_only_confirms(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, itertools.count(1.0, 0.05))
    job = ask_for(jobs)
    time_to_the_end: Callable[..., object] = Attempts.time

    def time_and_be_lost(*arguments: object, stage: Stage, **named: object) -> list[Trial]:
        found = cast("list[Trial]", time_to_the_end(*arguments, stage=stage, **named))
        if stage is Stage.FINAL:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Attempts, "time", time_and_be_lost)
    with pytest.raises(KeyboardInterrupt):
        work(jobs, repository, lambda: False)
    monkeypatch.setattr(Attempts, "time", time_to_the_end)
    before = repository.trials(problem=PROBLEM)

    run_job(jobs, repository, job)

    after = repository.trials(problem=PROBLEM)
    assert job_now(jobs, job).state is JobState.DONE
    assert before[-1].stage is Stage.FINAL
    assert {one.stage for one in after[len(before) :]} == {Stage.CONFIRM}


def test_a_job_that_cannot_be_run_here_says_why_and_others_go_on(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    impossible, possible = ask_for(jobs, threads=1024), ask_for(jobs)

    run_job(jobs, repository, possible)

    failed = job_now(jobs, impossible)
    assert failed.state is JobState.FAILED
    assert "1024 threads cannot be timed here" in failed.detail
    assert job_now(jobs, possible).detail.startswith("tuned: 2.00 times ")


def test_what_nobody_foresaw_fails_one_job_alone(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_arguments: object, **_named: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("gemm_tuner.tuning.job.sweep", break_down)
    first, second = ask_for(jobs), ask_for(jobs, replace(PROBLEM, n=48))

    run_job(jobs, repository, second)

    assert job_now(jobs, first).detail == "unexpected RuntimeError: a fault; please report this"
    assert {job_now(jobs, one).state for one in (first, second)} == {JobState.FAILED}


@pytest.mark.disturbed
def test_what_is_disturbed_decides_nothing_and_is_tried_three_times(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Interference(disturbed_rounds=0.9, stolen=0.0, others=1.5)
    plant_speeds(monkeypatch, repeat(2.0), repeat(busy))
    monkeypatch.setattr("gemm_tuner.tuning.patience.idle_cores", lambda: 0.0)
    monkeypatch.setattr("gemm_tuner.tuning.patience._LEAST_S", 0.1)
    attempts: dict[HeldJob, list[JobProgress]] = {}
    note = HeldJob.note

    def keep(self: HeldJob, progress: JobProgress) -> None:
        attempts.setdefault(self, []).append(progress)
        note(self, progress)

    monkeypatch.setattr(HeldJob, "note", keep)
    job = ask_for(jobs, budget_s=0.1)

    told = run_job(jobs, repository, job)

    over = job_now(jobs, job)
    assert (over.state, over.attempts) == (JobState.FAILED, 3)
    assert over.detail.startswith("nothing is decided: disturbed: in 90% of the rounds")
    assert [line.split()[2].rstrip(":") for line in told[1::2]] == ["waiting", "waiting", "failed"]
    for noted in attempts.values():
        tried = [one.tried for one in noted]
        assert tried == sorted(tried), "what is timed once more was tried all the same"
        assert all(one.best_ns for one in noted if one.tried)


def test_a_worker_begins_when_there_are_idle_cores(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    job = ask_for(jobs)
    states = []

    def look() -> float:
        states.append(job_now(jobs, job).state)
        return 0.1 * len(states)

    told = run_job(jobs, repository, job, idle_cores=look, sleep=lambda _seconds: None)

    assert states == [JobState.WAITING] * 7  # 0.7 cores are idle by then
    assert told[0] == "A job waits for idle cores: 0.1 are idle, and it needs 1."
    assert len(told) == 3


def test_a_worker_whose_clock_is_set_back_is_heard_of_and_waits_no_longer(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    job = ask_for(jobs)
    begin = datetime.now(UTC)
    told: list[str] = []

    def now() -> datetime:
        return begin - timedelta(hours=1) if told else begin

    def is_over() -> bool:
        return len(told) > 10 or job_now(jobs, job).state.is_over

    worker = new_worker(
        jobs,
        repository,
        is_stopped=is_over,
        tell=told.append,
        idle_cores=lambda: 0.0,
        now=now,
        sleep=lambda _seconds: told.append("still waiting"),
    )
    worker.show()
    worker.run_one(job.id)
    worker.show()

    assert told[0] == "A job waits for idle cores: 0.0 are idle, and it needs 1."
    assert job_now(jobs, job).state is JobState.DONE
    assert "still waiting" not in told
    assert jobs.has_worker(job.class_key, now())


def test_a_machine_that_is_always_busy_is_tried_at_last(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    job = ask_for(jobs)
    start = datetime.now(UTC)
    looks: list[float] = []

    def look() -> float:
        looks.append(0.0)
        return looks[-1]

    run_job(
        jobs,
        repository,
        job,
        idle_cores=look,
        sleep=lambda _seconds: None,
        now=lambda: start + timedelta(minutes=len(looks)),
    )

    assert job_now(jobs, job).state is JobState.DONE
    assert len(looks) == 11, "from the first on, ten minutes"


def test_workers_of_a_machine_measure_one_after_the_other(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    job = ask_for(jobs)
    other = MeasuringLock()
    assert other.acquire()
    polls: list[float] = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 5:
            assert job_now(jobs, job).state is JobState.WAITING
            other.release()

    run_job(jobs, repository, job, sleep=sleep)

    assert len(polls) == 5
    assert other.acquire(), "the worker gave it back"
    other.release()


def test_a_worker_waits_for_a_database_that_is_locked(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    job = ask_for(jobs)
    see_worker = jobs.see_worker
    faults = iter([StoreFailed("it is locked; wait."), StoreFailed("still; wait."), None])

    def see(name: str, **named: Any) -> None:  # noqa: ANN401 - those of the method
        fault = next(faults, None)
        if fault is not None:
            raise fault
        see_worker(name, **named)

    monkeypatch.setattr(jobs, "see_worker", see)
    pauses: list[float] = []

    told = run_job(jobs, repository, job, sleep=pauses.append)

    assert told[:2] == ["Waiting until it can go on: it is locked; wait.", "It goes on."]
    assert len(told) == 4
    assert sum(pauses) >= 3.0, "the second pause is longer"
    assert job_now(jobs, job).state is JobState.DONE


@pytest.mark.proof
def test_a_worker_runs_the_one_job_that_it_is_told_to(
    jobs: Jobs, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    first, second = ask_for(jobs), ask_for(jobs, replace(PROBLEM, n=24))
    told: list[str] = []
    worker = new_worker(jobs, repository, is_stopped=lambda: False, tell=told.append)

    worker.run_one(second.id)

    assert job_now(jobs, second).state is JobState.DONE
    assert job_now(jobs, first).state is JobState.WAITING
    jobs.claim("other", class_keys=[first.class_key], now=datetime.now(UTC), lease_s=60)
    for job_id in (first.id, second.id, "0" * 32):
        worker.run_one(job_id)  # another's, over, and none: there is nothing to do
    assert job_now(jobs, first).worker == "other"
    assert len(told) == 2


@contextmanager
def started_worker(url: str) -> Iterator["subprocess.Popen[str]"]:
    """Yield a process of the command, which is ended at the latest when the context is left."""
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER, url], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@_ON_SQLITE
@pytest.mark.proof
def test_when_a_worker_is_killed_the_next_one_finishes_its_job(
    jobs: Jobs, repository: Repository, database_url: str
) -> None:
    job = ask_for(jobs, budget_s=3.0)
    with started_worker(database_url) as process:
        wait_until(lambda: any(trial.measurement for trial in repository.trials()))
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = repository.trials(problem=PROBLEM)
    assert job_now(jobs, job).state is JobState.RUNNING

    # The lease is over by then.
    run_job(jobs, repository, job, now=lambda: datetime.now(UTC) + timedelta(minutes=2))

    over = job_now(jobs, job)
    after = repository.trials(problem=PROBLEM)
    raced = Counter(one.candidate for one in after if one.stage is Stage.RACE and one.measurement)
    assert (over.state, over.attempts) == (JobState.DONE, 2)
    assert after[: len(before)] == before
    assert set(raced.values()) == {1}, "what was raced is not raced again"


@_ON_SQLITE
@pytest.mark.proof
def test_a_worker_that_is_terminated_gives_its_job_back_and_says_so(
    jobs: Jobs, repository: Repository, database_url: str
) -> None:
    job = ask_for(jobs, Problem.parse("f32 64x256x256 nk bias+relu"), budget_s=600)
    with started_worker(database_url) as process:
        wait_until(lambda: job_now(jobs, job).progress.tried > 0)
        assert jobs.has_worker(job.class_key, datetime.now(UTC))
        process.terminate()
        _out, told = process.communicate(timeout=PATIENCE_S)

    waiting = job_now(jobs, job)
    assert process.returncode == 0
    assert (waiting.state, waiting.attempts) == (JobState.WAITING, 0)
    assert repository.trials()
    assert "Stopping after what is in flight" in told
    assert (
        told.splitlines()[-1]
        == f"Job {job.id[:8]} waiting: its worker was stopped; another goes on"
    )
    assert not jobs.has_worker(job.class_key, datetime.now(UTC))
