"""Asking for jobs, and running them: in this process, on a machine that looks idle."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import Job
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.worker import Worker

PROBLEM = Problem.parse("f32 8x32x16 nk bias+relu")
PATIENCE_S = 240.0


def ask_for(
    jobs: Jobs, problem: Problem = PROBLEM, *, budget_s: float = 1.0, threads: int = 1
) -> Job:
    """Ask for a job on CPUs like this one, and return it."""
    job, _is_new = jobs.submit(
        problem,
        class_key=detect_cpu().class_key,
        context=ExecutionContext(threads=threads),
        budget_s=budget_s,
        priority=0,
        owner="me",
        idempotency_key=None,
        now=datetime.now(UTC),
    )
    return job


def job_now(jobs: Jobs, job: Job) -> Job:
    """Return a job as it is now."""
    now = jobs.get(job.id)
    assert now is not None
    return now


def work(
    jobs: Jobs,
    repository: Repository,
    until: Callable[[], bool],
    **changes: Any,  # noqa: ANN401 - fields by name
) -> list[str]:
    """Let a worker run jobs until something is so, and return what it told."""
    told: list[str] = []
    new_worker(jobs, repository, **{"is_stopped": until, "tell": told.append, **changes}).work()
    return told


def new_worker(jobs: Jobs, repository: Repository, **fields: Any) -> Worker:  # noqa: ANN401 - by name
    """Return a worker that takes this machine for idle."""
    given: dict[str, Any] = {"idle_cores": lambda: None, **fields}
    return Worker(
        jobs=jobs, repository=repository, cpu=detect_cpu(), toolchain=find_toolchain(), **given
    )


def run_job(jobs: Jobs, repository: Repository, job: Job, **changes: Any) -> list[str]:  # noqa: ANN401 - fields by name
    """Let a worker run jobs until one is over."""
    return work(jobs, repository, lambda: job_now(jobs, job).state.is_over, **changes)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline_s = time.monotonic() + PATIENCE_S
    pause_s = 0.02
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.2)  # to ask a database takes milliseconds of a core
