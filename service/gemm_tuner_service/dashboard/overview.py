"""What the overview shows beside what is counted: names of CPUs, jobs, and the service's health."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.job import JobState
from gemm_tuner.store.jobs.misses import MissCount
from gemm_tuner.store.jobs.workers import Worker
from gemm_tuner_service.clients.callers import Caller
from gemm_tuner_service.dependencies import RunningService
from gemm_tuner_service.jobs.job_schemas import JobView

LIVE_JOBS = 5  # of those that run, and of those that wait
WANTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How the service does; workers and jobs are None for who may not see them."""

    fault: str | None
    database: str
    key_id: str
    revoked_kernels: int
    revoked_keys: int
    workers: tuple[tuple[str, int], ...] | None
    jobs: dict[JobState, int] | None


def names_of(service: RunningService, keys: Iterable[str]) -> dict[str, str]:
    """Return the brands of CPUs by their keys; the key itself where there is no brand."""
    asked = list(dict.fromkeys(keys))
    brands = {key: cpu.brand.strip() for key, cpu in service.repository.cpus(asked).items()}
    return {key: brands.get(key) or key for key in asked}


def live_jobs(service: RunningService, caller: Caller) -> list[JobView] | None:
    """Return jobs that run and wait, None for who may not see any."""
    if Scope.TUNE not in caller.scopes:
        return None
    return [
        job
        for state in (JobState.RUNNING, JobState.WAITING)
        for job in service.desk.newest(caller, state=state, limit=LIVE_JOBS)
    ]


def wanted(service: RunningService, caller: Caller, limit: int) -> tuple[MissCount, ...] | None:
    """Return what was asked for most and is not tuned, None for who may not see it."""
    if Scope.ADMIN not in caller.scopes:
        return None
    return service.misses.most_wanted(limit)


def workers_of(
    service: RunningService, caller: Caller, class_key: str
) -> tuple[Worker, ...] | None:
    """Return the workers for a class of CPUs, None for who may not see them."""
    if Scope.ADMIN not in caller.scopes:
        return None
    alive = service.desk.jobs.alive(datetime.now(UTC))
    return tuple(worker for worker in alive if worker.class_key == class_key)


def health_of(service: RunningService, caller: Caller) -> Health:
    """Return how the service does, as far as a caller may know."""
    revoked = service.repository.revocations()
    workers = None
    if caller.scopes & {Scope.TUNE, Scope.ADMIN}:
        alive = service.desk.jobs.alive(datetime.now(UTC))
        workers = tuple(sorted(Counter(worker.class_key for worker in alive).items()))
    jobs = None
    if Scope.METRICS in caller.scopes:
        jobs = dict(service.desk.views.counts())
    return Health(
        fault=service.readiness.fault(),
        database="PostgreSQL" if service.engine.dialect.name == "postgresql" else "SQLite",
        key_id=service.key_pair.key_id,
        revoked_kernels=len(revoked.artifacts),
        revoked_keys=len(revoked.key_ids),
        workers=workers,
        jobs=jobs,
    )
