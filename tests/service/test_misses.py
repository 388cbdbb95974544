"""`GET /v1/misses`: questions that have no measured answer are counted, and cost no answer."""

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from gemm_tuner_service.answering import miss_counter
from gemm_tuner_service.answering.answers import Asked
from gemm_tuner_service.answering.miss_counter import MissCounter
from gemm_tuner_service.settings import Settings
from job_site import TUNED, UNTUNED, JobSite
from samples import CONTEXT, CPU, PROBLEM, SIBLING_CPU, make_trial
from serving import served
from sqlalchemy import Engine

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.jobs.misses import Miss, Misses
from gemm_tuner.store.repository import Repository


@pytest.fixture
def counted() -> list[Mapping[Miss, int]]:
    return []


@pytest.fixture
def counter(
    counted: list[Mapping[Miss, int]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[MissCounter]:
    """Yield a counter that writes when a test says so."""
    monkeypatch.setattr(miss_counter, "WRITE_EVERY_S", 3600.0)
    counter = MissCounter(lambda counts, _now: counted.append(counts))
    yield counter
    counter.close()


def _misses(site: JobSite, query: str = "") -> list[dict[str, Any]]:
    answer = site.client.get(f"/v1/misses{query}", headers=site.headers(Scope.ADMIN))
    assert answer.status_code == 200
    found: list[dict[str, Any]] = answer.json()["misses"]
    return found


def _ask_in_all_ways(site: JobSite) -> None:
    """Ask for two problems, only one of which was tuned."""
    for problem in (UNTUNED, TUNED):
        for _time in range(2):  # the second is answered from memory
            site.resolve("", problem=problem)
        batch = {"problems": [problem]}
        for changes in ({}, {"max_loss": 0.02}):
            site.client.post("/v1/resolve:batch", json={**batch, **changes}, headers=site.tuner)
    site.client.get("/v1/kernels?m=8&n=64&k=32", headers=site.tuner)


def test_each_way_of_asking_in_vain_is_counted(settings: Settings, engine: Engine) -> None:
    with served(settings) as client:
        _ask_in_all_ways(JobSite(client, engine))  # written at the end

    with served(settings) as client:
        (miss,) = _misses(JobSite(client, engine))
    assert (miss["problem"], miss["class_key"]) == (UNTUNED, CPU.class_key)
    assert (miss["threads"], miss["regime"], miss["count"]) == (1, "hot", 5)
    assert miss["first_at"] == miss["last_at"]


def test_misses_are_written_while_the_service_runs(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(miss_counter, "WRITE_EVERY_S", 0.01)
    with served(settings) as client:
        site = JobSite(client, engine)
        site.resolve("")
        until = 2000
        while not Misses(engine).most_wanted(1) and until:
            until -= 1
        assert [miss["problem"] for miss in _misses(site)] == [UNTUNED]


def test_what_was_measured_since_is_no_miss(settings: Settings, engine: Engine) -> None:
    now = datetime.now().astimezone()
    problems = [Problem.parse(UNTUNED), Problem.parse("f32 9x9x9 nk none")]
    misses = [Miss(problem=one, class_key=CPU.class_key, context=CONTEXT) for one in problems]
    Misses(engine).add({misses[0]: 5, misses[1]: 2}, now)

    with served(settings) as client:
        site = JobSite(client, engine)
        assert [miss["count"] for miss in _misses(site)] == [5, 2]
        assert [miss["count"] for miss in _misses(site, "?limit=1")] == [5]
        Repository(engine).add_trial(make_trial(problem=problems[0]))
        assert [miss["problem"] for miss in _misses(site)] == [problems[1].text]


def test_only_an_admin_sees_what_others_ask_for(settings: Settings, engine: Engine) -> None:
    with served(settings) as client:
        site = JobSite(client, engine)
        answers = [
            client.get("/v1/misses", headers=site.headers(Scope.TUNE, Scope.RESOLVE)),
            client.get("/v1/misses"),
        ]
        for query in ("?limit=0", "?limit=1001", "?limit=x"):
            answer = client.get(f"/v1/misses{query}", headers=site.headers(Scope.ADMIN))
            assert answer.status_code == 422

    assert [answer.status_code for answer in answers] == [403, 403]


def test_cpus_of_a_class_are_counted_together(
    counter: MissCounter, counted: list[Mapping[Miss, int]]
) -> None:
    for cpu in (CPU, SIBLING_CPU, CPU):
        counter.note(Asked.of(PROBLEM, cpu, CONTEXT))

    counter.flush()
    counter.flush()

    miss = Miss(problem=PROBLEM, class_key=CPU.class_key, context=CONTEXT)
    assert counted == [{miss: 3}]


def test_no_count_is_lost_between_threads(
    counter: MissCounter, counted: list[Mapping[Miss, int]]
) -> None:
    asked = Asked.of(PROBLEM, CPU, CONTEXT)

    def note(_thread: int) -> None:
        for number in range(1000):
            counter.note(asked)
            if number % 100 == 0:
                counter.flush()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(note, range(4)))
    counter.flush()

    assert sum(count for each in counted for count in each.values()) == 4000


def test_only_so_many_questions_are_counted_at_once(
    counter: MissCounter, counted: list[Mapping[Miss, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(miss_counter, "MAX_COUNTED", 10)
    for m in range(1, 21):
        asked = Asked.of(Problem.parse(f"f32 {m}x4x4 nk none"), CPU, CONTEXT)
        counter.note(asked)
        counter.note(asked)

    counter.flush()

    assert list(counted[0].values()) == [2] * 10


def test_a_database_that_cannot_be_written_costs_no_answer_and_one_message(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_arguments: object) -> None:
        raise StoreFailed("the disk is full.")

    monkeypatch.setattr(Misses, "add", fail)
    monkeypatch.setattr(miss_counter, "WRITE_EVERY_S", 0.001)
    with caplog.at_level(logging.WARNING), served(settings) as client:
        for _time in range(20):
            assert client.post("/v1/resolve", json={"problem": UNTUNED}).status_code == 200

    told = [each.getMessage() for each in caplog.records if "not counted" in each.getMessage()]
    assert told == ["questions without a measured answer are not counted: the disk is full."]
