"""`POST /v1/resolve` with `tune` and `wait`: a question that is not tuned becomes a job."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest
from gemm_tuner_service.answering.answers import Asked
from gemm_tuner_service.clients import client_limits
from gemm_tuner_service.clients.callers import Caller
from gemm_tuner_service.jobs import job_desk, job_watch
from gemm_tuner_service.server.connections import ConnectionLimits
from gemm_tuner_service.settings import Settings
from job_site import TUNED, UNTUNED, JobSite, now
from samples import make_disturbed_trial, make_trial
from serving import served
from sqlalchemy import Engine

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.repository import Repository

WITHIN_S = 20.0


@pytest.fixture
def site(settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSite]:
    monkeypatch.setattr(job_watch, "POLL_S", 0.02)
    with served(settings) as client:
        yield JobSite(client, engine)


def test_what_is_not_tuned_becomes_a_job_and_is_answered_for_now(site: JobSite) -> None:
    plain = site.resolve("")
    answer = site.resolve("?tune=auto")

    job = answer.json().pop("job")
    assert answer.status_code == 202
    assert answer.headers["Location"] == job["url"] == f"/v1/jobs/{job['id']}"
    assert (job["problem"], job["state"], job["has_worker"]) == (UNTUNED, "waiting", False)
    assert {key: answer.json()[key] for key in plain.json()} == plain.json()
    assert site.resolve("?tune=auto").json()["job"]["id"] == job["id"]
    assert len(site.jobs.newest(10)) == 1


def test_what_was_measured_is_answered_and_is_no_job(site: JobSite) -> None:
    plain = site.resolve("", problem=TUNED)
    answer = site.resolve("?tune=auto&wait=30s", problem=TUNED)

    assert (answer.status_code, answer.content) == (200, plain.content)
    assert answer.headers["ETag"] == plain.headers["ETag"]
    assert not site.jobs.newest(1)


def test_a_disturbed_measurement_is_tuned_again(site: JobSite) -> None:
    disturbed = replace(make_disturbed_trial(), problem=Problem.parse(UNTUNED))
    Repository(site.engine).add_trial(disturbed)

    answer = site.resolve("?tune=auto")

    assert answer.json()["verdict"]["doubt"].startswith("disturbed")
    assert answer.status_code == 202


def test_waiting_brings_the_new_verdict(settings: Settings, engine: Engine) -> None:
    limits = ConnectionLimits(answer_s=4.0)  # a busy machine makes the job within that
    with ThreadPoolExecutor() as pool, served(settings, limits) as client:
        site = JobSite(client, engine)
        waiting = pool.submit(site.resolve, "?tune=auto&wait=60s")
        claimed = _claim_soon(site)
        time.sleep(limits.answer_s + 0.5)  # longer than other answers may take
        trial = make_trial(problem=claimed.problem)
        Repository(site.engine).add_trial(trial)
        site.finish(claimed)
        answer = waiting.result(timeout=WITHIN_S)

    assert answer.status_code == 200
    assert answer.json()["verdict"]["decision"] == "tuned"
    assert answer.json()["verdict"]["basis"] == "measured"
    assert "job" not in answer.json()


def test_when_the_time_is_up_the_job_is_named(site: JobSite) -> None:
    begin_s = time.monotonic()

    answer = site.resolve("?tune=auto&wait=1s")

    assert answer.status_code == 202
    assert 0.9 < time.monotonic() - begin_s < WITHIN_S
    assert site.resolve("?tune=auto&wait=0s").status_code == 202


def test_a_job_that_brought_nothing_is_not_begun_again_at_once(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.resolve("?tune=auto")
    site.finish(site.claim(), JobState.FAILED, "no compiler")

    soon = site.resolve("?tune=auto&wait=30s")
    assert soon.status_code == 200
    assert soon.json()["verdict"]["basis"] == "none"
    assert len(site.jobs.newest(10)) == 1

    monkeypatch.setattr(job_desk, "ASK_AGAIN", timedelta(0))
    assert site.resolve("?tune=auto").status_code == 202
    assert len(site.jobs.newest(10)) == 2


def test_a_job_that_ends_while_its_question_is_asked_is_not_begun_again(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question is answered with what that job brought."""
    site.resolve("?tune=auto")
    claimed = site.claim()
    original = Jobs.submit

    def late(self: Jobs, *asked: Any, **how: Any) -> tuple[Job, bool]:  # noqa: ANN401 - as it is given
        if not Repository(site.engine).trials(problem=claimed.problem):
            Repository(site.engine).add_trial(make_trial(problem=claimed.problem))
            site.finish(claimed)
        return original(self, *asked, **how)

    monkeypatch.setattr(Jobs, "submit", late)
    answer = site.resolve("?tune=auto")

    assert (answer.status_code, answer.json()["verdict"]["decision"]) == (200, "tuned")
    assert len(site.jobs.newest(10)) == 1


def test_waiting_alone_begins_nothing_and_tells_nothing_of_a_job_of_another(
    site: JobSite,
) -> None:
    asking = site.headers(Scope.RESOLVE)
    assert site.resolve("?wait=5s", asking).status_code == 200
    assert not site.jobs.newest(1)

    site.submit()
    in_vain = site.resolve("?wait=1s", asking)
    own = site.resolve("?wait=0s")

    assert (in_vain.status_code, "job" in in_vain.json()) == (200, False)
    assert (own.status_code, "job" in own.json()) == (202, True)
    other = site.headers(Scope.RESOLVE, Scope.TUNE)
    assert site.resolve("?wait=0s", other).status_code == 200
    assert site.resolve("?tune=auto", other).status_code == 202


def test_tuning_needs_its_scope_also_for_what_is_tuned(site: JobSite) -> None:
    asking = site.headers(Scope.RESOLVE)

    refused = [
        site.resolve("?tune=auto", asking),
        site.resolve("?tune=auto", asking, TUNED),
        site.client.post("/v1/resolve?tune=auto", json={"problem": UNTUNED}),
    ]

    assert [answer.status_code for answer in refused] == [403] * 3
    assert "the scope tune" in refused[0].json()["detail"]
    assert not site.jobs.newest(1)


@pytest.mark.parametrize(
    "query",
    [
        "wait=abc", "wait=", "wait=NaNs", "wait=infs", "wait=-1s", "wait=121s", "wait=1.5s",
        "wait=1000000000s", "wait=30", "wait=030s", "wait=%00s", "wait=\u0663s", "wait=30s%0a",
        "tune=yes", "tune=", "tune=AUTO", "wait=" + "9" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_time_or_no_way_to_tune_is_refused(site: JobSite, query: str) -> None:
    answer = site.resolve(f"?{query}")

    assert answer.status_code == 422
    assert not site.jobs.newest(1)


def test_waiting_is_bounded_for_each_client_and_keeps_no_place(site: JobSite) -> None:
    most = client_limits.MAX_WAITING_OF_CLIENT
    with ThreadPoolExecutor(most + 1) as pool:
        waiting = [pool.submit(site.resolve, "?tune=auto&wait=60s") for _caller in range(most + 1)]
        until_s = time.monotonic() + WITHIN_S
        while not any(one.done() for one in waiting) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert site.resolve("").is_success
        assert site.resolve("?tune=auto").status_code == 202
        site.finish(_claim_soon(site), JobState.FAILED, "")
        statuses = sorted(one.result(timeout=WITHIN_S).status_code for one in waiting)

    assert statuses == [200] * most + [429]


def test_who_leaves_at_once_keeps_no_place_to_wait(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = job_desk.JobDesk.tune

    def slow(self: job_desk.JobDesk, asked: Asked, caller: Caller) -> Job | None:
        time.sleep(0.2)  # until the caller has left
        return original(self, asked, caller)

    monkeypatch.setattr(job_desk.JobDesk, "tune", slow)
    body = json.dumps({"problem": UNTUNED}).encode()
    url = site.client.base_url
    head = (
        b"POST /v1/resolve?tune=auto&wait=60s HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nAuthorization: %b\r\nContent-Length: %d\r\n\r\n"
        % (site.tuner["Authorization"].encode(), len(body))
    )
    for _caller in range(client_limits.MAX_WAITING_OF_CLIENT):
        with socket.create_connection((url.host, url.port or 80)) as connection:
            connection.sendall(head + body)

    until_s = time.monotonic() + WITHIN_S
    while site.jobs.newest(1) == () and time.monotonic() < until_s:
        time.sleep(0.01)
    time.sleep(1.0)  # until all of them would wait
    # A busy machine may see later that the last has left. Those who wait would for a minute.
    while (status := site.resolve("?tune=auto&wait=1s").status_code) == 429:
        assert time.monotonic() < until_s
    assert status == 202


def test_what_was_cancelled_before_it_began_may_be_asked_for_again(site: JobSite) -> None:
    job = site.submit()
    site.client.post(f"{job['url']}:cancel", headers=site.tuner)

    again = site.resolve("?tune=auto", site.headers(Scope.RESOLVE, Scope.TUNE))

    assert again.status_code == 202
    assert again.json()["job"]["id"] != job["id"]


def test_what_no_worker_came_for_may_be_asked_for_again(site: JobSite) -> None:
    job = site.submit()
    site.jobs.end_untaken(now() + timedelta(days=4))

    again = site.resolve("?tune=auto")

    told = site.client.get(job["url"], headers=site.tuner).json()
    assert (told["state"], told["detail"][:9]) == ("failed", "no worker")
    assert again.status_code == 202
    assert again.json()["job"]["id"] != job["id"]


def test_who_cancels_keeps_nobody_else_from_having_it_tuned(site: JobSite) -> None:
    job = site.submit()
    claimed = site.claim()
    site.client.post(f"{job['url']}:cancel", headers=site.tuner)
    site.finish(claimed, JobState.CANCELLED, "cancelled before a kernel was timed")

    assert site.resolve("?tune=auto").status_code == 200, "they wanted it no more"
    again = site.resolve("?tune=auto", site.headers(Scope.RESOLVE, Scope.TUNE))

    assert again.status_code == 202
    assert again.json()["job"]["id"] != job["id"]


def test_who_waits_is_answered_when_the_service_ends(settings: Settings, engine: Engine) -> None:
    with ThreadPoolExecutor() as pool, httpx.Client(timeout=WITHIN_S) as other:
        with served(settings) as client:
            other.base_url = client.base_url
            site = JobSite(other, engine)
            waiting = pool.submit(site.resolve, "?tune=auto&wait=120s")
            _claim_soon(site)
            begin_s = time.monotonic()
        answer = waiting.result(timeout=WITHIN_S)

    assert time.monotonic() - begin_s < WITHIN_S
    assert answer.status_code == 202


def test_what_is_asked_with_a_query_is_answered_from_memory_too(site: JobSite) -> None:
    assert site.resolve("?", problem=TUNED).content == site.resolve("", problem=TUNED).content


def _claim_soon(site: JobSite) -> Job:
    """Take the job that a caller in another thread asks for."""
    until_s = time.monotonic() + WITHIN_S
    while not site.jobs.newest(1, state=JobState.WAITING) and time.monotonic() < until_s:
        time.sleep(0.01)
    return site.claim()
