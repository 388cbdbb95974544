"""A service with a quorum: what it answers, what its pages show, and which jobs it makes."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from gemm_tuner_service.settings import Settings
from job_site import TUNED, JobSite
from pages import Page
from samples import CPU, PROBLEM, make_trial
from serving import served
from sqlalchemy import Engine

from gemm_tuner.domain.job import JobState
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.attestation import MeasuringKeys


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[MeasuringKeys]:
    """Yield the keys of another host, which the service believes."""
    keys = MeasuringKeys(tmp_path / "other")
    MeasuringKeys().accept(keys.own_made())
    yield keys
    MeasuringKeys().forget(keys.own_made())


@pytest.fixture
def other(engine: Engine, keys: MeasuringKeys) -> Repository:
    """Return the store as the other host writes it."""
    return Repository(engine, keys)


@pytest.fixture
def others(engine: Engine, keys: MeasuringKeys) -> Jobs:
    """Return the jobs as the other host sees them."""
    return Jobs(engine, keys)


@pytest.fixture
def site(settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSite]:
    """Return a service that asks for two hosts, one of which measured a problem."""
    monkeypatch.setattr("gemm_tuner.store.watching.LOOK_EVERY_S", 0)
    with served(replace(settings, quorum=2)) as client:
        yield JobSite(client, engine)


def test_a_kernel_is_served_when_the_second_host_finds_it(site: JobSite, other: Repository) -> None:
    before = site.resolve("", problem=TUNED).json()
    other.add_trial(make_trial(minute=1))
    after = site.resolve("", problem=TUNED).json()

    assert (before["verdict"]["decision"], before["verdict"]["artifact"]) == ("tie", None)
    assert any("tuned on 1 of 2 hosts that the quorum asks for" in one for one in before["explain"])
    assert after["verdict"]["decision"] == "tuned"
    assert after["verdict"]["artifact"] is not None


def test_figures_of_hosts_that_disagree_are_answered_and_shown(
    site: JobSite, other: Repository
) -> None:
    other.add_trial(make_trial(minute=1, call_ns=1250))

    answer = site.resolve("", problem=TUNED).json()
    page = Page(site.client.get(f"/problems/{problem_id(PROBLEM)}"))

    for told in ("\n".join(answer["explain"]), page.text):
        assert "the 2 hosts disagree" in told
        assert "tuned, 1.250 times the speed of onednn 3.2.0" in told
        assert "baseline, 0.800 times the speed of onednn 3.2.0" in told


def test_what_lacks_a_host_is_a_job_for_another(
    site: JobSite, other: Repository, others: Jobs
) -> None:
    answer = site.resolve("?tune=auto", problem=TUNED)
    job = answer.json()["job"]

    assert (answer.status_code, job["state"], job["has_worker"]) == (202, "waiting", False)
    assert site.submit(problem=TUNED)["id"] == job["id"]
    assert site.jobs.claim("w", class_keys=[CPU.class_key], now=_now(), lease_s=60.0) is None
    others.see_worker("v", class_key=CPU.class_key, cpu_key=CPU.exact_key, now=_now())
    assert site.client.get(job["url"], headers=site.tuner).json()["has_worker"]

    claimed = others.claim("v", class_keys=[CPU.class_key], now=_now(), lease_s=60.0)
    assert claimed is not None
    other.add_trial(make_trial(minute=1))
    others.finish(claimed.id, "v", JobState.DONE, "tuned", _now())

    answer = site.resolve("?tune=auto", problem=TUNED)
    assert (answer.status_code, answer.json()["verdict"]["decision"]) == (200, "tuned")


def test_a_host_that_tried_in_vain_is_not_asked_again_and_again(
    site: JobSite, others: Jobs
) -> None:
    job = site.resolve("?tune=auto", problem=TUNED).json()["job"]
    claimed = others.claim("v", class_keys=[CPU.class_key], now=_now(), lease_s=60.0)
    assert claimed is not None
    assert claimed.id == job["id"]
    others.finish(claimed.id, "v", JobState.FAILED, "nothing was confirmed", _now())

    assert site.resolve("?tune=auto", problem=TUNED).status_code == 200


def test_a_service_that_asks_for_fewer_again_derives_anew(
    settings: Settings, site: JobSite
) -> None:
    assert site.resolve("", problem=TUNED).json()["verdict"]["artifact"] is None

    with served(settings) as client:
        answer = client.post("/v1/resolve", json={"problem": TUNED}, headers=site.tuner)
        old = site.resolve("", problem=TUNED)

    assert answer.json()["verdict"]["decision"] == "tuned"
    assert old.json()["verdict"]["artifact"] is None, "it goes by its own setting"


def _now() -> datetime:
    return datetime.now(UTC)
