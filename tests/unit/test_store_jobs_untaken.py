"""A job for which no worker comes leaves its place, and one of a long queue does not."""

import pytest
from queueing import CLASS, ask, at, claim, problem
from samples import CPU
from sqlalchemy import Engine

from gemm_tuner.domain.job import JobState
from gemm_tuner.store.jobs import jobs as store_jobs
from gemm_tuner.store.jobs.jobs import Jobs, JobsFull

DAY_S = 86_400.0


@pytest.fixture
def jobs(engine: Engine) -> Jobs:
    return Jobs(engine)


def test_a_job_that_no_worker_comes_for_leaves_its_place(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_jobs, "MAX_IN_FLIGHT", 1)
    first, _new = ask(jobs)
    with pytest.raises(JobsFull):
        ask(jobs, problem(2), now=at(2.9 * DAY_S))

    second, is_new = ask(jobs, problem(2), now=at(3.1 * DAY_S))

    ended = jobs.get(first.id)
    assert ended is not None
    assert (ended.state, ended.changed_at) == (JobState.FAILED, at(3.1 * DAY_S))
    assert ended.detail.startswith("no worker that can run it came within 3 days; start one")
    assert ended.revision > first.revision, "who follows it is told"
    assert is_new
    jobs.end_untaken(at(7 * DAY_S))
    assert jobs.newest(2, state=JobState.WAITING) == ()
    assert second.state is JobState.WAITING


def test_a_job_whose_worker_was_lost_leaves_its_place_though_no_other_comes(jobs: Jobs) -> None:
    job, _new = ask(jobs)
    claim(jobs)

    states = []
    for days in (2, 4):
        jobs.end_untaken(at(days * DAY_S))
        found = jobs.get(job.id)
        assert found is not None
        states.append(found.state)

    assert states == [JobState.RUNNING, JobState.FAILED]
    assert not jobs.is_held(job.id, "one")


def test_a_long_queue_waits_for_as_long_as_its_class_is_run(jobs: Jobs) -> None:
    late, _new = ask(jobs, problem(1), priority=-1)
    elsewhere, _new = ask(jobs, problem(1), class_key="another")
    ask(jobs, problem(2))
    jobs.finish(claim(jobs).id, "one", JobState.DONE, "tuned", at(2 * DAY_S))

    jobs.end_untaken(at(4 * DAY_S))

    assert [job.id for job in jobs.newest(3, state=JobState.WAITING)] == [late.id]
    assert [job.id for job in jobs.newest(3, state=JobState.FAILED)] == [elsewhere.id]


def test_a_worker_that_comes_late_takes_what_waited(jobs: Jobs) -> None:
    job, _new = ask(jobs)
    late_s = 30 * DAY_S
    jobs.see_worker("one", class_key=CLASS, cpu_key=CPU.exact_key, now=at(late_s))

    jobs.end_untaken(at(late_s))

    assert claim(jobs, seconds=late_s).id == job.id
