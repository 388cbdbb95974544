"""What is asked for in vain is counted, and no longer once it is measured."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from samples import CONTEXT, CPU, PROBLEM, add_build, make_trial
from sqlalchemy import Engine

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.jobs import misses as store_misses
from gemm_tuner.store.jobs.misses import Miss, MissCount, Misses
from gemm_tuner.store.repository import Repository

NOW = datetime(2026, 11, 23, tzinfo=UTC)
MISS = Miss(problem=PROBLEM, class_key=CPU.class_key, context=CONTEXT)


@pytest.fixture
def misses(engine: Engine) -> Misses:
    return Misses(engine)


def miss_of(m: int) -> Miss:
    return replace(MISS, problem=Problem.parse(f"f32 {m}x64x64"))


def wanted(misses: Misses, limit: int = 100) -> list[tuple[Problem, int]]:
    return [(each.problem, each.count) for each in misses.most_wanted(limit)]


def test_what_is_asked_again_is_counted(misses: Misses) -> None:
    later = NOW + timedelta(seconds=5)

    misses.add({MISS: 2}, NOW)
    misses.add({MISS: 3, miss_of(1): 1}, later)

    assert misses.most_wanted(1) == (
        MissCount(
            problem=PROBLEM,
            class_key=CPU.class_key,
            context=CONTEXT,
            count=5,
            first_at=NOW,
            last_at=later,
        ),
    )


def test_the_most_wanted_come_first(misses: Misses) -> None:
    misses.add({miss_of(m): m for m in (2, 9, 4)}, NOW)

    assert [count for _problem, count in wanted(misses)] == [9, 4, 2]
    assert [count for _problem, count in wanted(misses, 2)] == [9, 4]


def test_classes_and_contexts_are_told_apart(misses: Misses) -> None:
    cold = replace(MISS, context=ExecutionContext(threads=2, regime=Regime.COLD_WEIGHTS))
    other = replace(MISS, class_key="another")

    misses.add({MISS: 1, cold: 2, other: 3}, NOW)

    assert len(misses.most_wanted(100)) == 3
    (of_other,) = misses.most_wanted(100, class_key="another")
    assert of_other.count == 3
    assert {each.context for each in misses.most_wanted(9, class_key=CPU.class_key)} == {
        CONTEXT,
        cold.context,
    }


def test_what_was_measured_since_is_left_out(misses: Misses, repository: Repository) -> None:
    elsewhere = replace(MISS, class_key="another")
    cold = replace(MISS, context=ExecutionContext(regime=Regime.COLD_WEIGHTS))
    misses.add({MISS: 3, elsewhere: 2, cold: 1}, NOW)

    add_build(repository)
    repository.add_trial(make_trial())

    left = misses.most_wanted(100)
    assert [(each.class_key, each.context) for each in left] == [
        ("another", CONTEXT),
        (CPU.class_key, cold.context),
    ]


def test_beyond_the_bound_those_asked_least_are_dropped(
    misses: Misses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_misses, "MAX_MISSES", 20)

    misses.add({miss_of(m): m for m in range(1, 21)}, NOW)
    assert len(wanted(misses)) == 20
    misses.add({miss_of(100): 1}, NOW)

    assert [count for _problem, count in wanted(misses)] == list(range(20, 2, -1))
    misses.add({miss_of(100): 1}, NOW)
    assert (miss_of(100).problem, 1) in wanted(misses), "there is room for what is new"
