"""Asking for jobs and taking them, at times that a test sets."""

from datetime import UTC, datetime, timedelta
from typing import Any

from samples import CONTEXT, CPU, PROBLEM

from gemm_tuner.domain.job import Job
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.jobs.jobs import Jobs

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
LEASE_S = 60.0
CLASS = CPU.class_key


def at(seconds: float) -> datetime:
    """Return the time so many seconds after `NOW`."""
    return NOW + timedelta(seconds=seconds)


def problem(m: int) -> Problem:
    """Return a small problem with so many rows."""
    return Problem.parse(f"f32 {m}x64x64")


def ask(jobs: Jobs, asked: Problem = PROBLEM, /, **changes: Any) -> tuple[Job, bool]:  # noqa: ANN401 - fields by name
    """Ask for a job on CPUs like that of the samples; return it, and whether it is new."""
    question: dict[str, Any] = {
        "class_key": CLASS,
        "context": CONTEXT,
        "budget_s": 30.0,
        "priority": 0,
        "owner": "me",
        "idempotency_key": None,
        "now": NOW,
    }
    return jobs.submit(asked, **(question | changes))


def claim(jobs: Jobs, worker: str = "one", *, seconds: float = 0, class_key: str = CLASS) -> Job:
    """Take the next job."""
    found = claim_if_any(jobs, worker, seconds=seconds, class_key=class_key)
    assert found is not None
    return found


def claim_if_any(
    jobs: Jobs, worker: str = "one", *, seconds: float = 0, class_key: str = CLASS
) -> Job | None:
    """Take the next job, None if there is none."""
    return jobs.claim(worker, class_keys=[class_key], now=at(seconds), lease_s=LEASE_S)
