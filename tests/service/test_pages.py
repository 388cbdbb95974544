"""The pages for people: what they show to whom, that links lead somewhere, and what they load."""

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from gemm_tuner_service.settings import Settings
from job_site import JobSite
from pages import follow_all, read_page
from samples import CPU, PROBLEM, make_artifact, make_failed_trial, make_trial, make_trial_of
from serving import served

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.jobs.misses import Miss, Misses
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.repository import Repository

HOSTILE = "<script>alert(1)</script> \x1b[31m \u202e {{ 7*7 }} \"' &lt;"
KEY = problem_id(PROBLEM)

pytestmark = pytest.mark.usefixtures("patient")


def test_the_overview_counts_what_is_known(site: JobSite) -> None:
    repository = Repository(site.engine)
    repository.add_trial(make_trial_of(1, call_ns=500))
    repository.add_trial(make_trial_of(64, call_ns=1300))

    page = read_page(site.client, "/")

    assert [f"{CPU.exact_key} {CPU.brand}", "2", "0", "1", "0", "0"] in page.rows
    assert ["f32", "up to 1", "up to 2^24", "1", "0", "0", "0", "0"] in page.rows
    assert ["f32", "9 to 64", "up to 2^24", "0", "0", "1", "0", "0"] in page.rows
    assert page.elements["svg"] >= 3
    assert "readiness" in page.text.lower()
    assert page.answer.headers["Cache-Control"] == "no-store"


def test_an_empty_database_has_pages_too(tmp_path: Path, database_url: str) -> None:
    settings = Settings(database_url=database_url, signing_key_path=tmp_path / "k" / "s.pem")
    with served(settings) as client:
        page = read_page(client, "/")
        assert "Nothing was measured here yet" in page.text
        assert "Nothing was measured here yet" in read_page(client, "/cpus").text
        assert client.get(f"/problems/{KEY}").status_code == 404
        assert client.get(f"/cpus/{CPU.exact_key}").status_code == 404


def test_a_problem_shows_what_was_tried_and_why_it_is_answered_so(site: JobSite) -> None:
    repository = Repository(site.engine)
    other = make_artifact(b"another")
    repository.add_trial(replace(make_failed_trial(minute=2), artifact=other))
    repository.add_trial(make_trial_of(1, call_ns=500))

    page = read_page(site.client, f"/problems/{KEY}")

    by_outcome = {row[2].split()[0]: row for row in page.rows if "avx512_f32" in row[0]}
    tuned = by_outcome["tuned"]
    assert tuned[3:8] == ["800 ns", "800 ns to 800 ns", "1.250", "1.250 to 1.250", "onednn 3.2.0"]
    assert "crashed" in by_outcome["crashed"][2]
    assert "SIGILL" in page.text
    assert f"exact: measured on {CPU.exact_key}." in page.text
    assert ["1", "tuned", "500 ns"] in [row[:3] for row in page.rows]  # of the curve over m


def test_a_kernel_shows_its_source_while_it_may_be_served(site: JobSite) -> None:
    digest = make_artifact().sha256

    assert f"/kernels/{digest}" in read_page(site.client, f"/problems/{KEY}").links
    assert "// a kernel" in read_page(site.client, f"/kernels/{digest}").text

    now = datetime.now(UTC)
    Repository(site.engine).revoke(digest, reason="wrong", actor="t", now=now)
    assert site.client.get(f"/kernels/{digest}").status_code == 404
    assert "1 kernel, 0 signing keys" in read_page(site.client, "/").text


def test_jobs_are_shown_to_who_asked_for_them_in_each_state(site: JobSite) -> None:
    site.submit(problem="f32 1x64x32 nk none")
    first = site.claim()
    site.report(first, tried=7, failed=2, best_ns=1500.0, over_baseline=1.25, seconds_left=15.0)
    for state in (JobState.DONE, JobState.FAILED, JobState.CANCELLED):
        site.submit(problem=f"f32 {2 + list(JobState).index(state)}x64x32 nk none")
        site.finish(site.claim(), state, detail=HOSTILE)
    waiting = site.submit(problem="f32 9x64x32 nk none")

    page = read_page(site.client, "/jobs", headers=site.tuner)

    states = {row[2].split()[0] for row in page.rows[1:]}
    assert states == {state.value for state in JobState}
    running = next(row for row in page.rows if row[2].startswith("running"))
    assert running[4:8] == ["7", "2", "1.5 µs", "1.250"]
    assert page.elements["progress"] == 1
    for link in page.links:
        if link.startswith("/jobs/"):
            of_job = read_page(site.client, link, headers=site.tuner)
            assert "\x1b" not in of_job.answer.text
            assert not of_job.elements["script"]
    assert (
        waiting["id"] in read_page(site.client, f"/jobs/{waiting['id']}", headers=site.tuner).text
    )
    live = read_page(site.client, "/", headers=site.tuner)
    assert f"/jobs/{first.id}" in live.links

    other = site.headers(Scope.TUNE, Scope.RESOLVE)
    assert site.client.get(f"/jobs/{first.id}", headers=other).status_code == 404
    assert "There is no such job" in read_page(site.client, "/jobs", headers=other).text
    assert f"/jobs/{first.id}" not in read_page(site.client, "/", headers=other).links
    everything = site.headers(Scope.TUNE, Scope.ADMIN)
    assert f"/jobs/{first.id}" in read_page(site.client, "/jobs", headers=everything).links


def test_jobs_come_page_by_page(site: JobSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemm_tuner_service.routes.pages.JOBS_AT_ONCE", 2)
    ids = [site.submit(problem=f"f32 {m}x64x32 nk none")["id"] for m in range(1, 6)]

    shown, place = [], "/jobs"
    while place:
        page = read_page(site.client, place, headers=site.tuner)
        shown += [link[6:] for link in page.links if re.fullmatch("/jobs/[0-9a-f]{32}", link)]
        place = next((link for link in page.links if "before=" in link), "")

    assert shown == ids[::-1]


def test_what_all_ask_for_is_shown_to_admin_alone(site: JobSite) -> None:
    miss = Miss(
        problem=Problem.parse("f32 3x5x7 nk none"),
        class_key=HOSTILE.replace("\x1b", ""),
        context=ExecutionContext(),
    )
    Misses(site.engine).add({miss: 12}, datetime.now(UTC))

    admin = site.headers(Scope.ADMIN, Scope.RESOLVE)
    page = read_page(site.client, "/wanted", headers=admin)

    assert ["f32 3x5x7 nk none", "12"] in [row[:2] for row in page.rows]
    assert "f32 3x5x7" in read_page(site.client, "/", headers=admin).text
    assert "f32 3x5x7" not in read_page(site.client, "/", headers=site.tuner).text
    assert site.client.get("/wanted", headers=site.tuner).status_code == 403
    assert site.client.get("/wanted").status_code == 403


def test_answers_of_a_cpu_come_page_by_page_in_order(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner_service.routes.pages.LISTED_AT_ONCE", 3)
    repository = Repository(site.engine)
    for m in range(1, 8):
        repository.add_trial(make_trial_of(m, call_ns=600 + 10 * (m % 4)))

    ratios, place = [], f"/cpus/{CPU.exact_key}"
    while place:
        page = read_page(site.client, place)
        ratios += [row[3] for row in page.rows if "3072x768" in row[0]]
        place = next((link for link in page.links if "cursor=" in link), "")

    assert len(ratios) == 8
    assert ratios == sorted(ratios, reverse=True)
    assert (
        "There is no such answer"
        in read_page(site.client, f"/cpus/{CPU.exact_key}?standing=baseline").text
    )


def test_a_place_is_found_among_more_than_are_listed(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.store.listing.MAX_PLACES", 2)
    monkeypatch.setattr("gemm_tuner_service.routes.pages.MAX_PLACES", 2)
    repository = Repository(site.engine)
    keys = [CPU.exact_key]
    for stepping in (5, 6, 7):
        cpu = replace(CPU, stepping=stepping)
        keys.append(cpu.exact_key)
        repository.add_trial(make_trial(cpu=cpu))

    for key in keys:
        page = read_page(site.client, f"/problems/{KEY}?cpu={key}&threads=1&regime=hot")
        assert f"exact: measured on {key}." in page.text
        assert "These are the first 2" in page.text


def test_trials_come_page_by_page_the_newest_first(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner_service.dashboard.problem.TRIED_AT_ONCE", 2)
    for minute in range(1, 5):
        Repository(site.engine).add_trial(make_trial(minute=minute, call_ns=800 + minute))

    times, place = [], f"/problems/{KEY}"
    while place:
        page = read_page(site.client, place)
        times += [row[3] for row in page.rows if len(row) == 10 and "avx512_f32" in row[0]]
        place = next((link for link in page.links if "before=" in link), "")

    assert times == ["804 ns", "803 ns", "802 ns", "801 ns", "800 ns"]


def test_what_was_imported_is_not_shown(site: JobSite) -> None:
    elsewhere = make_trial(problem=Problem.parse("f32 7x7x7 nk none"))
    Repository(site.engine).add_imported([elsewhere])

    assert site.client.get(f"/problems/{problem_id(elsewhere.problem)}").status_code == 404
    found = site.client.get("/problems", params={"text": elsewhere.problem.text})
    assert found.status_code == 404
    assert "Nothing was tried here" in found.text


def test_an_m_of_a_range_is_found_where_the_range_is(site: JobSite) -> None:
    texts = {m: f"f32 {m}x7x7 nk none" for m in ("1..512", "1..64", "8", "64", "65", "513")}
    for m in ("1..512", "1..64", "8"):
        Repository(site.engine).add_trial(make_trial(problem=Problem.parse(texts[m])))

    def found(m: str) -> str:
        asked = {"text": texts[m]}
        answer = site.client.get("/problems", params=asked, follow_redirects=False)
        return str(answer.headers.get("Location", ""))

    def page_of(m: str) -> str:
        return f"/problems/{problem_id(Problem.parse(texts[m]))}"

    assert found("64") == page_of("1..64")  # the narrowest
    assert found("65") == page_of("1..512")
    assert found("8") == page_of("8")
    assert not found("513")


def test_what_others_wrote_is_text_and_nothing_else(site: JobSite) -> None:
    cpu = replace(CPU, brand=HOSTILE, stepping=9)
    measured = make_trial().measurement
    assert measured is not None
    hostile = make_trial(
        cpu=cpu,
        toolchain=HOSTILE,
        generator="0.1-b",
        measurement=replace(measured, baseline=HOSTILE),
    )
    repository = Repository(site.engine)
    repository.add_trial(hostile)
    repository.add_trial(replace(make_failed_trial(minute=9), cpu=cpu, detail=HOSTILE))

    for path in ("/", "/cpus", f"/cpus/{cpu.exact_key}", f"/problems/{KEY}?cpu={cpu.exact_key}"):
        page = read_page(site.client, path)
        assert not page.elements["script"], path
        assert not {"\x1b", "\u202e"} & set(page.answer.text), path
        assert "49" not in re.findall(r"alert\(1\).{0,80}", page.text), path
    assert "<script>alert(1)</script> \\x1b[31m" in page.text


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site: JobSite) -> None:
    repository = Repository(site.engine)
    repository.add_trial(make_trial_of(1, call_ns=500))
    site.submit()
    admin = site.headers(*Scope)

    with httpx.Client(base_url=site.client.base_url, headers=admin, timeout=60) as everything:
        pages = follow_all(everything, "/")

    assert len(pages) > 12
    for place, page in pages.items():
        assert page.answer.status_code == 200, place
        assert not page.elements["script"]
        assert not any(name == "style" or name.startswith("on") for _t, name, _v in page.attributes)
        for tag, value in page.loaded:
            assert value.startswith(("/", "#")), (place, tag, value)
            assert not value.startswith("//"), (place, tag, value)
        if page.answer.headers["Content-Type"].startswith("text/html"):
            policy = page.answer.headers["Content-Security-Policy"]
            nonces = {value for _tag, name, value in page.attributes if name == "nonce"}
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert all(f"'nonce-{nonce}'" in policy for nonce in nonces)
            assert page.elements["style"] == sum(
                name == "nonce" for _tag, name, _value in page.attributes
            )
            assert page.answer.headers["X-Frame-Options"] == "DENY"
            assert page.answer.headers["X-Content-Type-Options"] == "nosniff"
            assert page.elements["h1"] == 1


@pytest.mark.parametrize("path", ["/", "/cpus", "/problems", "/absent"])
def test_head_of_a_page_is_as_get_without_the_body(site: JobSite, path: str) -> None:
    expected = site.client.get(path)

    answer = site.client.head(path)

    assert (answer.status_code, answer.content) == (expected.status_code, b"")
    assert answer.headers["Content-Type"] == expected.headers["Content-Type"]


def test_a_page_costs_its_caller_as_much_as_answers_do(settings: Settings) -> None:
    with served(replace(settings, client_rate=1.0)) as client:
        answers = [client.get("/") for _turn in range(8)]

    assert answers[0].status_code == 200
    assert answers[-1].status_code == 429
    assert answers[-1].headers["Content-Type"].startswith("text/html")
    assert int(answers[-1].headers["Retry-After"]) > 0
