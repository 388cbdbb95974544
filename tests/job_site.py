"""A service whose callers may ask for jobs, and a worker that does what a test says."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
from samples import CPU, PROBLEM
from sqlalchemy import Engine

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.job import Job, JobProgress, JobState
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.tokens import Tokens

UNTUNED = "f32 8x64x32 nk none"
WORKER = "worker"
LEASE_S = 60.0


def now() -> datetime:
    """Return the time."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class JobSite:
    """A client of a service, and its database."""

    client: httpx.Client
    engine: Engine
    tuner: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        """Make a token that may tune."""
        object.__setattr__(self, "tuner", self.headers(Scope.RESOLVE, Scope.TUNE))

    @property
    def jobs(self) -> Jobs:
        """Return the jobs of the database."""
        return Jobs(self.engine)

    def headers(self, *scopes: Scope) -> dict[str, str]:
        """Return the headers of the holder of a new token."""
        _token, secret = Tokens(self.engine).create("ci", scopes, actor="test", now=now())
        return {"Authorization": f"Bearer {secret.text}"}

    def post(self, headers: dict[str, str] | None = None, **changes: object) -> httpx.Response:
        """Ask for a job, by default for a problem that is not tuned."""
        question = {"problem": UNTUNED, **changes}
        return self.client.post("/v1/jobs", json=question, headers=headers or self.tuner)

    def submit(self, headers: dict[str, str] | None = None, **changes: object) -> dict[str, Any]:
        """Return the job that was asked for."""
        answer = self.post(headers, **changes)
        assert answer.status_code in {200, 202}, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def resolve(
        self, query: str, headers: dict[str, str] | None = None, problem: str = UNTUNED
    ) -> httpx.Response:
        """Ask for the kernel of a problem."""
        return self.client.post(
            f"/v1/resolve{query}", json={"problem": problem}, headers=headers or self.tuner
        )

    def claim(self) -> Job:
        """Take the next job, as a worker does."""
        job = self.jobs.claim(WORKER, class_keys=[CPU.class_key], now=now(), lease_s=LEASE_S)
        assert job is not None
        return job

    def report(self, job: Job, **progress: Any) -> None:  # noqa: ANN401 - of its fields
        """Tell how far a job is."""
        assert self.jobs.report(job.id, WORKER, JobProgress(**progress), now(), LEASE_S)

    def finish(self, job: Job, state: JobState = JobState.DONE, detail: str = "tuned") -> None:
        """End a job."""
        self.jobs.finish(job.id, WORKER, state, detail, now())


TUNED = PROBLEM.text
