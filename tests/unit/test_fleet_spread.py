"""Questions become jobs a part at a time, and are followed until all are over."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, update

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.fleet import spread as spread_module
from gemm_tuner.fleet.spread import Question, Spread
from gemm_tuner.store.jobs import jobs as store_jobs
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.jobs.views import JobViews
from gemm_tuner.store.sql.tables import jobs as rows

NOW = datetime(2026, 11, 25, 12, 0, tzinfo=UTC)
BUDGET_S = 10.0


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> datetime:
        return NOW + timedelta(seconds=self.seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def jobs(engine: Engine) -> Jobs:
    return Jobs(engine)


def question(m: int, class_key: str = "a") -> Question:
    problem = Problem.parse(f"f32 {m}x8x8")
    return Question(problem=problem, class_key=class_key, context=ExecutionContext())


def spread_of(engine: Engine, clock: Clock, *questions: Question, owner: str = "me") -> Spread:
    jobs, views = Jobs(engine), JobViews(engine)
    return Spread(jobs, views, questions, budget_s=BUDGET_S, owner=owner, now=clock)


def is_over(spread: Spread) -> bool:
    return spread.is_over


def run_next(jobs: Jobs, clock: Clock, class_key: str, state: JobState = JobState.DONE) -> None:
    job = jobs.claim("w", class_keys=[class_key], now=clock(), lease_s=60)
    assert job is not None
    jobs.finish(job.id, "w", state, "what came out", clock())


def test_what_took_longer_than_its_budget_is_not_said_to_be_over_soon(
    engine: Engine, clock: Clock
) -> None:
    spread = spread_of(engine, clock, question(1), question(2))

    spread.step()
    clock.seconds = 3 * BUDGET_S

    assert spread.seconds_left({"a": 2}) == 3 * BUDGET_S


def test_each_question_is_asked_once_and_followed_to_its_end(
    engine: Engine, jobs: Jobs, clock: Clock
) -> None:
    questions = [question(1), question(1, "b"), question(2), question(1)]
    spread = spread_of(engine, clock, *questions)

    spread.step()
    assert spread.count == 3, "one is there twice"
    assert spread.seconds_left({"a": 1, "b": 1}) == 2 * BUDGET_S
    run_next(jobs, clock, "a")
    run_next(jobs, clock, "b", JobState.FAILED)
    clock.seconds = 4
    spread.step()
    assert not is_over(spread)
    assert spread.seconds_left({"a": 1, "b": 1}) == 4, "as long as the first of this class took"
    run_next(jobs, clock, "a")
    spread.step()

    assert is_over(spread)
    assert {one: job.state for one, job in spread.over.items()} == {
        questions[0]: JobState.DONE,
        questions[1]: JobState.FAILED,
        questions[2]: JobState.DONE,
    }


def test_no_more_is_asked_for_than_there_is_room(
    engine: Engine, jobs: Jobs, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread_module, "_IN_FLIGHT", 3)
    monkeypatch.setattr(store_jobs, "MAX_IN_FLIGHT", 2)
    spread = spread_of(engine, clock, *map(question, range(1, 6)))

    most = 0
    while not is_over(spread):
        spread.step()
        most = max(most, len(jobs.newest(10, state=JobState.WAITING)))
        if not is_over(spread):
            run_next(jobs, clock, "a")

    assert most == 2
    assert len(spread.over) == 5


def test_a_damaged_job_is_asked_for_again_and_keeps_nobody_from_stopping(
    engine: Engine, jobs: Jobs, clock: Clock
) -> None:
    spread = spread_of(engine, clock, question(1))
    spread.step()
    [first] = jobs.newest(1)

    for _step in range(2):
        with engine.begin() as connection:
            connection.execute(update(rows).values(budget_s=-1.0))
        spread.step()
        spread.step()
        [again] = jobs.newest(1, state=JobState.WAITING)
        assert again.id != first.id
    with engine.begin() as connection:
        connection.execute(update(rows).values(budget_s=-1.0))
    spread.stop()
    spread.step()

    assert is_over(spread)


def test_what_another_sweep_cancels_is_asked_for_again_by_who_joined_it(
    engine: Engine, jobs: Jobs, clock: Clock
) -> None:
    first, second = (spread_of(engine, clock, question(1)) for _sweep in range(2))
    first.step()
    second.step()

    first.stop()
    first.step()
    second.step()
    second.step()
    assert is_over(first)
    assert not is_over(second)
    [again] = jobs.newest(1, state=JobState.WAITING)
    jobs.cancel(again.id, clock())
    second.step()

    assert is_over(second), "its own is not asked for again"
    assert [job.state for job in second.over.values()] == [JobState.CANCELLED]


def test_who_stops_cancels_what_only_they_asked_for(
    engine: Engine, jobs: Jobs, clock: Clock
) -> None:
    others = spread_of(engine, clock, question(1), owner="other")
    others.step()
    spread = spread_of(engine, clock, question(1), question(2), question(3))
    spread.step()
    running = jobs.claim("w", class_keys=["a"], now=clock(), lease_s=60)
    assert running is not None
    jobs.finish(running.id, "w", JobState.DONE, "", clock())
    running = jobs.claim("w", class_keys=["a"], now=clock(), lease_s=60)
    assert running is not None

    spread.stop()
    spread.step()
    assert not is_over(spread), "one runs still, and keeps its best"
    now = jobs.get(running.id)
    assert now is not None
    assert now.is_cancel_asked
    jobs.finish(running.id, "w", JobState.CANCELLED, "cancelled; tuned", clock())
    spread.step()

    assert is_over(spread)
    states = [job.state for job in spread.over.values()]
    assert sorted(states) == [JobState.CANCELLED, JobState.CANCELLED, JobState.DONE]


def test_a_cancelled_job_whose_worker_was_lost_ends_too(
    engine: Engine, jobs: Jobs, clock: Clock
) -> None:
    spread = spread_of(engine, clock, question(1))
    spread.step()
    jobs.claim("w", class_keys=["a"], now=clock(), lease_s=60)

    spread.stop()
    spread.step()
    assert not is_over(spread)
    clock.seconds = 61
    spread.step()

    assert is_over(spread)
