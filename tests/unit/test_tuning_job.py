"""What a job does with its time."""

from datetime import UTC, datetime
from functools import partial

import pytest
from samples import CPU

from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import PreparationStopped, TrialFailed
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.job import JobRun
from gemm_tuner.tuning.ranges.holding import HeldJob
from gemm_tuner.tuning.settings import SweepSettings

NOW = datetime(2026, 12, 1, tzinfo=UTC)
JOB = Job(
    id="a",
    problem=Problem.parse("f32 1..4x64x64 nk none"),
    class_key=CPU.class_key,
    context=ExecutionContext(),
    budget_s=900.0,
    priority=0,
    state=JobState.RUNNING,
    owner="somebody",
    created_at=NOW,
    changed_at=NOW,
)


@pytest.mark.parametrize(("taken_s", "left_s"), [(0.0, 900.0), (600.0, 300.0), (899.0, 112.5)])
def test_a_range_that_cannot_be_split_is_tuned_in_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, taken_s: float, left_s: float
) -> None:
    seconds, budgets = [0.0], []

    def split(*_arguments: object, settings: SweepSettings, **_named: object) -> None:
        assert settings.budget_s < JOB.budget_s / 2
        seconds[0] += taken_s
        raise TrialFailed("an m was not timed.")

    def sweep(*_arguments: object, settings: SweepSettings, **_named: object) -> None:
        budgets.append(settings.budget_s)
        raise PreparationStopped("enough is known.")

    clocked = partial(Budget, clock=lambda: seconds[0])
    monkeypatch.setattr("gemm_tuner.tuning.job.Budget", clocked)
    monkeypatch.setattr("gemm_tuner.tuning.job.split_range", split)
    monkeypatch.setattr("gemm_tuner.tuning.job.sweep", sweep)
    database = open_database("sqlite://")
    held = HeldJob(JOB, Jobs(database), worker="w", now=lambda: NOW, on_report=lambda: None)
    run = JobRun(
        held=held,
        cpu=CPU,
        repository=Repository(database),
        toolchain=Toolchain(name="gcc", version="12.2.0", command=("gcc",)),
        is_stopped=lambda: bool(budgets),
    )

    assert run.run() is None

    assert budgets == [left_s]
