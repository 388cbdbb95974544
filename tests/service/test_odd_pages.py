"""Odd questions, damaged rows and a database that is away: a clear page with the right status."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from threading import Event
from typing import Any

import httpx
import pytest
from gemm_tuner_service.answering import tally_keeper
from gemm_tuner_service.settings import Settings
from job_site import JobSite, now
from pages import Page, count_always
from samples import CONTEXT, CPU, PROBLEM, make_artifact
from serving import served
from sqlalchemy import Engine, text

from gemm_tuner.domain.access import Scope
from gemm_tuner.store.jobs.misses import Miss, Misses
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.tallies import Counting

KEY = problem_id(PROBLEM)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/cpus/unknown", 404),
        ("/cpus/%00", 404),
        (f"/cpus/{CPU.exact_key}?cursor=%ff", 422),
        (f"/cpus/{CPU.exact_key}?cursor=bm8", 422),
        (f"/cpus/{CPU.exact_key}?cursor=W1tdXQ", 422),
        (f"/cpus/{CPU.exact_key}?cursor=" + "x" * 300, 422),
        (f"/cpus/{CPU.exact_key}?standing=<b>", 422),
        ("/problems/unknown", 404),
        ("/problems/" + "0" * 64, 404),
        (f"/problems/{KEY}?cpu=unknown", 404),
        (f"/problems/{KEY}?cpu=%00", 404),
        (f"/problems/{KEY}?cpu=%ed%a0%80", 404),
        (f"/problems/{KEY}?threads=2", 404),
        (f"/problems/{KEY}?threads=0", 422),
        (f"/problems/{KEY}?threads=" + "9" * 100, 422),
        (f"/problems/{KEY}?threads=%D9%A3", 422),
        (f"/problems/{KEY}?regime=both", 422),
        (f"/problems/{KEY}?regime=%1b", 422),
        (f"/problems/{KEY}?before=-1", 422),
        (f"/problems/{KEY}?before=0", 200),
        (f"/problems/{KEY}?before=999999999", 200),
        ("/problems?text=nonsense", 422),
        ("/problems?text=" + "x" * 2000, 422),
        ("/problems?text=f32+1x1x1&text=f32+2x2x2", 422),
        ("/problems?text=%ff%fe", 422),
        ("/kernels/unknown", 404),
        ("/kernels/" + "0" * 64, 404),
        ("/?" + "x" * 5000, 200),
        ("/?cursor=1&standing=%00", 200),
        ("/jobs", 403),
        ("/jobs/" + "0" * 32, 403),
    ],
)
def test_odd_questions_get_a_clear_page(client: httpx.Client, path: str, status: int) -> None:
    answer = client.get(path)

    assert answer.status_code == status
    assert answer.headers["Content-Type"].startswith("text/html")
    assert "Content-Security-Policy" in answer.headers
    assert Page(answer).elements["h1"] == 1


@pytest.mark.parametrize(
    ("path", "status"), [("/cpus/", 404), ("/index.html", 404), ("//x", 404), ("/sign-out", 405)]
)
def test_a_mistyped_address_is_told_to_a_browser_as_a_page(
    client: httpx.Client, path: str, status: int
) -> None:
    url = f"{str(client.base_url).rstrip('/')}{path}"
    of_browser = client.get(url, headers={"Accept": "text/html,application/xhtml+xml;q=0.9"})
    of_program = client.get(url)
    of_interface = client.get("/v1/absent", headers={"Accept": "text/html"})

    assert (of_browser.status_code, of_program.status_code) == (status, status)
    assert of_browser.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in of_browser.headers["Content-Security-Policy"]
    assert "/" in Page(of_browser).links
    for answer in (of_program, of_interface):
        assert answer.headers["Content-Type"].startswith("application/problem+json")


def test_odd_questions_on_jobs_get_a_clear_page(site: JobSite) -> None:
    for path, status in (
        ("/jobs?state=odd", 422),
        ("/jobs?before=unknown", 422),
        ("/jobs?before=" + "0" * 32, 200),
        ("/jobs/unknown", 404),
        ("/jobs/%00", 404),
    ):
        answer = site.client.get(path, headers=site.tuner)
        assert (answer.status_code, path) == (status, path)
        assert Page(answer).elements["h1"] == 1


def test_a_database_that_is_away_is_said(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_always(monkeypatch)
    with served(settings) as client:
        assert client.get("/").status_code == 200
        engine = open_database(settings.database_url)
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE verdicts RENAME TO hidden"))
        engine.dispose()

        answer = client.get("/")

    assert answer.status_code == 503
    assert "the database did not do what was asked" in answer.text
    assert answer.headers["Content-Type"].startswith("text/html")


def test_pages_tell_how_old_their_counts_are_where_new_ones_take_long(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Counted at" not in site.client.get("/").text
    may_count = Event()
    monkeypatch.setattr(Counting, "tallies", lambda *_: may_count.wait(30))
    monkeypatch.setattr(tally_keeper, "PATIENCE_S", 0.0)

    texts = [site.client.get(path).text for path in ("/", "/cpus")]
    may_count.set()

    assert all(f'Counted at <span class="when">{datetime.now(UTC):%Y-}' in text for text in texts)


def test_damaged_figures_are_no_error_of_the_service(site: JobSite) -> None:
    with site.engine.begin() as connection:
        connection.execute(text("UPDATE verdicts SET log_ratio = 1e300, call_ns = 1e-300"))

    for path in ("/", f"/cpus/{CPU.exact_key}", f"/problems/{KEY}"):
        assert site.client.get(path).status_code in {200, 503}


def test_a_damaged_token_is_no_fault_of_who_holds_it(site: JobSite) -> None:
    held = site.headers(Scope.RESOLVE)
    with site.engine.begin() as connection:
        connection.execute(text("UPDATE tokens SET name = '<b>'"))

    answer = site.client.get("/", headers=held)

    assert answer.status_code == 503
    assert "cannot be read: token name" in Page(answer).text


# Values that SQLite takes, and nothing of gemm-tuner stores.
DAMAGE: tuple[tuple[str, str, object], ...] = (
    ("verdicts", "cpu_key", b"\xff"),
    ("verdicts", "peak_share", "odd"),
    ("verdicts", "call_ns", "odd"),
    ("verdicts", "call_ns", float("inf")),
    ("cpus", "document", b"\xff"),
    ("problems", "document", b"\xff"),
    ("trials", "document", b"\xff"),
    ("artifacts", "document", b"\xff"),
    ("jobs", "class_key", b"\xff"),
    ("jobs", "tried", "odd"),
    ("jobs", "seconds_left", float("inf")),
    ("jobs", "budget_s", 0.0),
    ("misses", "class_key", b"\xff"),
    ("misses", "asked", "odd"),
)


@pytest.fixture
def unlimited(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[JobSite]:
    """Yield a service that draws no pictures, and may be asked as often as one likes."""
    monkeypatch.setattr("gemm_tuner_service.dashboard.pictures.can_draw", lambda: False)
    count_always(monkeypatch)
    with served(replace(settings, client_rate=1e9)) as client:
        yield JobSite(client, engine)


def _keep(engine: Engine, table: str, column: str, values: Mapping[int, object]) -> dict[int, Any]:
    """Put values into a column, by the number of the row, 0 for all; return what was there."""
    former = text(f"SELECT rowid, {column} FROM {table}")  # noqa: S608 - ours
    change = text(f"UPDATE {table} SET {column} = :value WHERE :row IN (0, rowid)")  # noqa: S608
    with engine.begin() as connection:
        found: dict[int, Any] = {row: value for row, value in connection.execute(former)}  # noqa: C416
        for row, value in values.items():
            connection.execute(change, {"value": value, "row": row})
    return found


@pytest.mark.parametrize("databases", ["sqlite"], indirect=True, scope="session")
def test_values_of_other_types_are_damage_and_no_fault_of_service_or_caller(
    unlimited: JobSite,
) -> None:
    site = unlimited
    site.submit()
    job = site.claim()
    site.report(job, seconds_left=5.0)
    miss = Miss(problem=PROBLEM, class_key="other-1-2-avx2-0", context=CONTEXT)
    Misses(site.engine).add({miss: 5}, now())
    admin = site.headers(*Scope)
    places = [
        *("/", "/cpus", f"/cpus/{CPU.exact_key}", f"/problems/{KEY}", "/jobs", "/wanted"),
        *(f"/jobs/{job.id}", f"/kernels/{make_artifact().sha256}"),
        *("/v1/jobs", "/v1/misses", "/v1/records"),
    ]

    def statuses() -> set[int]:
        return {site.client.get(place, headers=admin).status_code for place in places}

    assert statuses() == {200}
    for table, column, value in DAMAGE:
        former = _keep(site.engine, table, column, {0: value})
        assert statuses() <= {200, 404, 503}, (table, column, value)
        _keep(site.engine, table, column, former)
    assert statuses() == {200}
