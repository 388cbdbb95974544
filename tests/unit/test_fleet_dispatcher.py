"""Rows that wait become tasks, by class of CPUs, and again when a task was lost."""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hosts import Hosts
from samples import CPU, PROBLEM, add_build, make_trial
from sqlalchemy import Engine as DatabaseEngine

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import StoreFailed
from gemm_tuner.fleet.dispatcher import Dispatcher
from gemm_tuner.fleet.library import SchedulerUnreachable
from gemm_tuner.fleet.task import run_job
from gemm_tuner.store.jobs.jobs import Jobs

NOW = datetime(2026, 11, 25, 12, 0, tzinfo=UTC)
LEASE_S = 60.0


@dataclass
class ByHand:
    """Does nothing by itself: a test ends the tasks."""

    tasks: dict[str, "Future[None]"] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def place(self, job_id: str) -> "Future[None]":
        self.order.append(job_id)
        self.tasks[job_id] = Future()
        return self.tasks[job_id]


@dataclass
class Machines:
    """An engine with workers of some classes, which may be cut off."""

    there: dict[str, int]
    is_away: bool = False
    by_class: dict[str, ByHand] = field(default_factory=dict)
    names: list[set[str]] = field(default_factory=list)  # of the workers that were asked for
    closed: int = 0

    def places(self) -> Mapping[str, int]:
        if self.is_away:
            raise SchedulerUnreachable("the scheduler does not answer; start it.")
        return self.there

    def of_class(self, class_key: str) -> ByHand:
        return self.by_class.setdefault(class_key, ByHand())

    def place(
        self,
        task: Callable[[str], object],
        job_id: str,
        *,
        class_key: str,
        names: Collection[str] = (),
    ) -> "Future[None]":
        assert task is run_job
        self.names.append(set(names))
        return self.of_class(class_key).place(job_id)

    def close(self) -> None:
        self.closed += 1


@dataclass
class Site:
    """A dispatcher with its database and machines, at a time that a test sets."""

    jobs: Jobs
    machines: Machines
    told: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.dispatcher = Dispatcher(
            jobs=self.jobs, connect=lambda: self.machines, tell=self.told.append, now=self.now
        )

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds)

    def ask(self, m: int, class_key: str = "a", priority: int = 0) -> str:
        job, _is_new = self.jobs.submit(
            Problem.parse(f"f32 {m}x8x8"),
            class_key=class_key,
            context=ExecutionContext(),
            budget_s=1.0,
            priority=priority,
            owner="me",
            idempotency_key=None,
            now=self.now(),
        )
        return job.id

    def claim(self, job_id: str, worker: str = "w", class_key: str = "a") -> Job | None:
        return self.jobs.claim(
            worker, class_keys=[class_key], now=self.now(), lease_s=LEASE_S, only=job_id
        )

    def step(self, seconds: float = 0.0) -> None:
        self.seconds += seconds
        self.dispatcher.step()

    def placed(self, class_key: str = "a") -> list[str]:
        return self.machines.of_class(class_key).order

    def end(self, job_id: str, class_key: str = "a", error: Exception | None = None) -> None:
        task = self.machines.of_class(class_key).tasks[job_id]
        if error is None:
            task.set_result(None)
        else:
            task.set_exception(error)


@pytest.fixture
def site(engine: DatabaseEngine) -> Site:
    return Site(jobs=Jobs(engine), machines=Machines({"a": 2, "b": 1}))


def test_jobs_go_to_workers_of_their_class_the_most_urgent_first(site: Site) -> None:
    late, urgent, first = site.ask(1), site.ask(2, priority=5), site.ask(3, priority=1)
    other, nobodys = site.ask(4, "b"), site.ask(5, "c")

    site.step()

    assert site.placed("a") == [urgent, first], "as many as there are workers"
    assert site.placed("b") == [other]
    assert site.placed("c") == []
    site.claim(urgent)
    site.jobs.finish(urgent, "w", JobState.DONE, "", site.now())
    site.end(urgent)
    site.step()
    assert site.placed("a") == [urgent, first, late]
    site.machines.there["c"] = 1
    site.step()
    assert site.placed("c") == [nobodys]


def test_a_job_whose_task_was_lost_is_placed_again_after_a_pause(site: Site) -> None:
    job = site.ask(1)
    site.step()
    for pause_s in (1, 2, 4, 8, 16, 30, 30):
        before = len(site.placed())
        site.end(job, error=OSError("the worker was lost"))
        site.step(0.5)
        site.step(pause_s - 0.1)
        assert len(site.placed()) == before, "not at once"
        site.step(0.1)
        assert len(site.placed()) == before + 1

    assert set(site.placed()) == {job}


def test_a_job_that_runs_is_not_placed_until_its_worker_is_lost(site: Site) -> None:
    job = site.ask(1)
    site.step()
    assert site.claim(job) is not None
    site.end(job, error=OSError("the worker was lost"))

    site.step()
    site.step(LEASE_S - 1)
    assert len(site.placed()) == 1, "the lease still holds"
    site.step(2)
    assert len(site.placed()) == 2


def test_a_task_that_comes_twice_runs_the_job_once(site: Site) -> None:
    job = site.ask(1)
    site.step()
    other = Site(jobs=site.jobs, machines=Machines({"a": 1}))
    other.step()

    assert other.placed() == [job], "two dispatchers know nothing of each other"
    assert site.claim(job, "one") is not None
    assert site.claim(job, "two") is None


def test_a_scheduler_that_is_lost_costs_no_job(site: Site) -> None:
    jobs = [site.ask(1), site.ask(2)]
    site.step()
    first, site.machines = site.machines, Machines({"a": 2})
    first.is_away = site.machines.is_away = True

    for _second in range(10):
        site.step(1)
    assert site.told == ["Waiting until it can go on: the scheduler does not answer; start it."], (
        "it is said once"
    )
    assert first.closed == 1
    site.machines.is_away = False
    site.step(30)

    assert site.told[1:] == ["It goes on."]
    assert site.placed() == jobs


def test_a_clock_that_is_set_back_ends_no_pause_later(site: Site) -> None:
    job = site.ask(1)
    site.machines.is_away = True
    site.step()
    site.machines.is_away = False

    site.step(-86_400)
    assert site.placed() == [job]
    site.end(job)
    site.step(1)
    site.step(-86_400)
    assert site.placed() == [job, job]


def test_a_database_that_does_not_answer_keeps_the_tasks(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = site.ask(1), site.ask(2), site.ask(3)
    site.step()

    def fail(*_arguments: object, **_named: object) -> tuple[str, ...]:
        raise StoreFailed("it restarts; wait.")

    with monkeypatch.context() as patch:
        patch.setattr(site.jobs, "ready", fail)
        site.claim(first)
        site.jobs.finish(first, "w", JobState.DONE, "", site.now())
        site.end(first)
        site.step()
    site.step(1)

    assert site.machines.closed == 0
    assert site.told == ["Waiting until it can go on: it restarts; wait.", "It goes on."]
    assert site.placed() == [first, second, third], "what runs was not placed anew"


def test_what_one_host_measured_goes_to_others(engine: DatabaseEngine, tmp_path: Path) -> None:
    hosts = Hosts(engine, tmp_path, ["service", "a", "b"])
    hosts("service").require_quorum(2)
    add_build(hosts("service"))
    hosts("a").add_trial(make_trial())
    class_key = CPU.class_key
    site = Site(jobs=hosts.jobs("service"), machines=Machines({class_key: 2}))

    def ask(problem: Problem) -> str:
        job, _is_new = site.jobs.submit(
            problem,
            class_key=class_key,
            context=ExecutionContext(),
            budget_s=1.0,
            priority=0,
            owner="me",
            idempotency_key=None,
            now=NOW,
        )
        return job.id

    second, fresh = ask(PROBLEM), ask(Problem.parse("f32 8x8x8"))
    hosts.jobs("a").see_worker("A", class_key=class_key, cpu_key=CPU.exact_key, now=NOW)

    site.step()
    assert site.placed(class_key) == [fresh], "it holds up no other"

    hosts.jobs("b").see_worker("B", class_key=class_key, cpu_key=CPU.exact_key, now=NOW)
    site.step()

    assert site.placed(class_key) == [fresh, second]
    assert [names for names in site.machines.names if names] == [{"B"}]
