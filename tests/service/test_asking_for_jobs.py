"""`/v1/jobs`: asking for a problem to be tuned, and who may see and cancel that."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from threading import Event
from typing import Any

import httpx
import pytest
from gemm_tuner_service.jobs import job_desk
from gemm_tuner_service.jobs.job_schemas import EstimateView
from gemm_tuner_service.routes import jobs as jobs_route
from gemm_tuner_service.settings import Settings
from job_site import TUNED, UNTUNED, JobSite, now
from prometheus_client.parser import text_string_to_metric_families
from samples import CPU
from serving import served
from sqlalchemy import Engine

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.estimate import Estimate
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.errors import NoKernelFamily, StoreFailed
from gemm_tuner.store.jobs import jobs as module
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.jobs.views import JobViews
from gemm_tuner.tuning.estimate import estimate_job

NOBODY = "0" * 32
WITHIN_S = 20.0


@pytest.fixture
def site(settings: Settings, engine: Engine) -> Iterator[JobSite]:
    with served(replace(settings, estimate=estimate_job)) as client:
        yield JobSite(client, engine)


def test_a_job_waits_for_a_worker_of_its_class(site: JobSite) -> None:
    answer = site.post(budget_s=5, priority=7, threads=2, regime="cold_weights")

    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["Location"] == f"/v1/jobs/{job['id']}" == job["url"]
    assert job["state"] == "waiting"
    assert (job["problem"], job["class_key"]) == (UNTUNED, CPU.class_key)
    assert (job["threads"], job["regime"]) == (2, "cold_weights")
    assert (job["budget_s"], job["priority"], job["has_worker"]) == (5, 7, False)
    assert site.client.get(job["url"], headers=site.tuner).json() == job

    site.jobs.see_worker("w", class_key=CPU.class_key, cpu_key=CPU.exact_key, now=now())
    assert site.client.get(job["url"], headers=site.tuner).json()["has_worker"]


def test_the_same_question_in_flight_is_the_same_job(site: JobSite) -> None:
    first, second = site.post(), site.post(priority=50)
    other = site.post(threads=2)

    assert (first.status_code, second.status_code) == (202, 200)
    assert second.json()["id"] == first.json()["id"] != other.json()["id"]
    assert second.headers["Location"] == first.headers["Location"]
    assert second.json()["priority"] == 50


def test_a_key_names_a_job_also_when_that_is_over(site: JobSite) -> None:
    headers = {**site.tuner, "Idempotency-Key": "build 7"}
    first = site.submit(headers)
    site.finish(site.claim())

    again = site.post(headers)
    without = site.post()
    for_another = site.post(headers, threads=2)

    assert (again.status_code, again.json()["id"]) == (200, first["id"])
    assert again.json()["state"] == "done"
    assert without.status_code == 202
    assert for_another.status_code == 422
    assert "another question" in for_another.json()["detail"]


@pytest.mark.parametrize("key", ["", "x" * 129, "a\tb", "\xe9"])
def test_a_key_that_cannot_be_one_is_refused(site: JobSite, key: str) -> None:
    answer = site.client.post(
        "/v1/jobs",
        json={"problem": UNTUNED},
        headers=[(b"Idempotency-Key", key.encode("latin-1")), *_raw(site.tuner)],
    )

    assert answer.status_code in {400, 422}
    assert not site.jobs.newest(10)


def test_an_estimate_stores_nothing(site: JobSite) -> None:
    answer = site.post(dry_run=True, budget_s=10)

    assert answer.status_code == 200
    assert answer.json()["candidates"] > 100
    assert 10 < answer.json()["estimated_seconds"] < 100
    assert not site.jobs.newest(10)


def test_without_an_estimator_the_space_is_counted(settings: Settings, engine: Engine) -> None:
    with served(settings) as client:
        answer = JobSite(client, engine).post(dry_run=True)

    assert answer.json()["candidates"] > 100
    assert answer.json()["estimated_seconds"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"budget_s": 0.4},
        {"budget_s": 3601},
        {"budget_s": 10**400},
        {"budget_s": "30"},
        {"budget_s": None},
        {"priority": 101},
        {"priority": -(10**30)},
        {"priority": 1.5},
        {"dry_run": "yes"},
        {"threads": 0},
        {"threads": 10**9},
        {"problem": "f32 0x4x4 nk none"},
        {"problem": "f32 0x4x4 nk none", "dry_run": True},
        {"problem": "x" * 2000},
        {"regime": "warm"},
        {"unknown": 1},
    ],
    ids=str,
)
def test_what_cannot_be_a_job_is_refused(site: JobSite, changes: dict[str, Any]) -> None:
    answer = site.post(**changes)

    assert answer.status_code == 422
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert not site.jobs.newest(10)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_budget_that_is_no_number_is_refused(site: JobSite, number: str) -> None:
    body = f'{{"problem": "{UNTUNED}", "budget_s": {number}}}'

    answer = site.client.post(
        "/v1/jobs", content=body, headers={**site.tuner, "Content-Type": "application/json"}
    )

    assert answer.status_code == 422


def test_a_problem_that_no_family_covers_has_no_estimate(
    settings: Settings, engine: Engine
) -> None:
    def refuse(*_asked: object) -> Estimate:
        raise NoKernelFamily("no kernel family covers it.")

    with served(replace(settings, estimate=refuse)) as client:
        answer = JobSite(client, engine).post(dry_run=True)

    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:gemm-tuner:problem:no-kernel-family"


def test_too_many_jobs_are_refused_for_a_while(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_IN_FLIGHT_OF_OWNER", 2)
    for threads in (1, 2):
        site.submit(threads=threads)

    refused = site.post(threads=3)
    of_another = site.post(site.headers(Scope.TUNE), threads=3)

    assert refused.status_code == 429
    assert refused.json()["type"] == "urn:gemm-tuner:problem:jobs-full"
    assert int(refused.headers["Retry-After"]) > 0
    assert of_another.status_code == 202


def test_jobs_are_listed_the_newest_first_by_state(site: JobSite) -> None:
    ids = [site.submit(threads=threads)["id"] for threads in (1, 2, 3)]
    site.finish(site.claim(), JobState.FAILED, "no compiler")

    listed = _listed(site, "")

    assert [job["id"] for job in listed] == ids[::-1]
    assert [job["id"] for job in _listed(site, "?limit=1")] == ids[-1:]
    assert [job["detail"] for job in _listed(site, "?state=failed")] == ["no compiler"]
    for query in ("?limit=0", "?limit=1001", "?limit=x", "?state=lost", "?state="):
        assert site.client.get(f"/v1/jobs{query}", headers=site.tuner).status_code == 422


def test_a_job_of_another_is_not_there(site: JobSite) -> None:
    job = site.submit()
    other = site.headers(Scope.TUNE)

    answers = [
        site.client.get(job["url"], headers=other),
        site.client.get(f"{job['url']}/events", headers=other),
        site.client.post(f"{job['url']}:cancel", headers=other),
        site.client.get(f"/v1/jobs/{NOBODY}", headers=other),
    ]

    assert [answer.status_code for answer in answers] == [404] * 4
    assert not site.client.get("/v1/jobs", headers=other).json()["jobs"]
    assert site.jobs.newest(1)[0].state is JobState.WAITING


def test_who_asks_the_same_sees_the_job_and_cannot_cancel_it(site: JobSite) -> None:
    job = site.submit()
    other = site.headers(Scope.TUNE)

    assert site.submit(other)["id"] == job["id"]
    assert site.submit(other)["id"] == job["id"]
    assert site.client.get(job["url"], headers=other).is_success
    listed = site.client.get("/v1/jobs", headers=other).json()["jobs"]
    assert [each["id"] for each in listed] == [job["id"]]
    assert site.client.post(f"{job['url']}:cancel", headers=other).status_code == 403


def test_sharing_a_job_takes_no_key_of_its_owner(site: JobSite) -> None:
    job = site.submit()
    other = site.headers(Scope.TUNE)
    site.submit(other)

    answer = site.post({**other, "Idempotency-Key": f"job {job['id']}"}, priority=3)

    assert answer.status_code == 200
    assert answer.json()["id"] == job["id"]


def test_writers_that_wait_leave_the_database_to_others(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, original = Event(), Jobs.submit

    def slow(self: Jobs, *given: Any, **named: Any) -> tuple[Job, bool]:  # noqa: ANN401 - handed on
        assert may_go_on.wait(WITHIN_S)
        return original(self, *given, **named)

    monkeypatch.setattr(Jobs, "submit", slow)
    monkeypatch.setattr(job_desk, "_LONGEST_WAIT_S", 0.2)
    with ThreadPoolExecutor(job_desk.MAX_WRITERS + 1) as pool:
        asking = [pool.submit(site.post) for _caller in range(job_desk.MAX_WRITERS + 1)]
        refused = next(as_completed(asking, WITHIN_S)).result()
        resolved = site.resolve("")
        may_go_on.set()
        statuses = sorted(one.result(WITHIN_S).status_code for one in asking)

    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    assert resolved.status_code == 200
    assert statuses == [200] * (job_desk.MAX_WRITERS - 1) + [202, 503]


def test_estimates_take_turns(site: JobSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for many threads takes seconds, and nothing else runs in this process meanwhile."""
    may_go_on, original = Event(), jobs_route._estimate

    def slow(*given: Any) -> EstimateView:  # noqa: ANN401 - handed on
        assert may_go_on.wait(WITHIN_S)
        return original(*given)

    monkeypatch.setattr(jobs_route, "_estimate", slow)
    monkeypatch.setattr(job_desk, "_LONGEST_WAIT_S", 0.2)
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(site.post, dry_run=True) for _caller in range(2)]
        refused = next(as_completed(asking, WITHIN_S)).result()
        asked = site.post()
        may_go_on.set()
        statuses = sorted(one.result(WITHIN_S).status_code for one in asking)

    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    assert asked.status_code == 202
    assert statuses == [200, 503]


def test_an_admin_sees_and_cancels_all_jobs(site: JobSite) -> None:
    job = site.submit()
    admin = site.headers(Scope.TUNE, Scope.ADMIN)

    assert site.client.get("/v1/jobs", headers=admin).json()["jobs"][0]["id"] == job["id"]
    cancelled = site.client.post(f"{job['url']}:cancel", headers=admin)

    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")


def test_a_running_job_is_asked_to_end_and_may_be_asked_twice(site: JobSite) -> None:
    job = site.submit()
    claimed = site.claim()

    answers = [_cancel(site, job) for _time in range(2)]

    assert [answer["state"] for answer in answers] == ["running"] * 2
    assert all(answer["is_cancel_asked"] for answer in answers)
    site.finish(claimed, JobState.CANCELLED, "the best so far is kept")
    assert _cancel(site, job)["state"] == "cancelled"


def test_a_job_that_is_over_stays_as_it_is(site: JobSite) -> None:
    job = site.submit()
    site.finish(site.claim())

    after = _cancel(site, job)

    assert (after["state"], after["is_cancel_asked"], after["detail"]) == ("done", False, "tuned")


@pytest.mark.parametrize(
    "job_id", ["0" * 31, "0" * 33, "G" * 32, "A" * 32, "%00" * 32, "0" * 32 + "%0a", "x" * 5000]
)
def test_what_is_no_id_is_refused(site: JobSite, job_id: str) -> None:
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", ":cancel")):
        answer = site.client.request(method, f"/v1/jobs/{job_id}{path}", headers=site.tuner)
        assert answer.status_code in {404, 422}


def test_jobs_need_the_scope(site: JobSite) -> None:
    on_loopback = site.client.post("/v1/jobs", json={"problem": UNTUNED})

    assert on_loopback.status_code == 403
    assert site.post(site.headers(Scope.RESOLVE, Scope.ADMIN)).status_code == 403
    assert not site.jobs.newest(1)


def test_a_tuned_problem_can_be_tuned_again(site: JobSite) -> None:
    assert site.submit(problem=TUNED)["state"] == "waiting"


def test_jobs_are_counted_for_prometheus_by_state(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for threads in (1, 2, 3):
        site.submit(threads=threads)
    site.finish(site.claim())
    site.claim()

    counts = _jobs_in_metrics(site)
    monkeypatch.setattr(JobViews, "counts", _fail)

    assert counts == {"waiting": 1, "running": 1, "done": 1, "failed": 0, "cancelled": 0}
    assert not _jobs_in_metrics(site)


def _fail(_views: JobViews) -> None:
    raise StoreFailed("the database does not answer.")


def _jobs_in_metrics(site: JobSite) -> dict[str, float]:
    answer = site.client.get("/metrics")
    assert answer.status_code == 200
    return {
        sample.labels["state"]: sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name == "gemm_tuner_jobs"
    }


def _cancel(site: JobSite, job: dict[str, Any]) -> dict[str, Any]:
    answer = site.client.post(f"{job['url']}:cancel", headers=site.tuner)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def _listed(site: JobSite, query: str) -> list[dict[str, Any]]:
    answer = site.client.get(f"/v1/jobs{query}", headers=site.tuner)
    assert answer.status_code == 200
    found: list[dict[str, Any]] = answer.json()["jobs"]
    return found


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in httpx.Headers(headers).items()]
