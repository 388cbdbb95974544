"""The pages in chromium: accessible in both colour schemes, by keyboard, without script."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from gemm_tuner_service.settings import Settings
from job_site import JobSite
from pages import follow_all
from samples import (
    CPU,
    FAST_CONDITIONS,
    PROBLEM,
    make_artifact,
    make_disturbed_trial,
    make_failed_trial,
    make_trial,
)
from serving import served
from sqlalchemy import Engine

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.job import JobState
from gemm_tuner.domain.rows import Rows
from gemm_tuner.store.jobs.misses import Miss, Misses
from gemm_tuner.store.repository import Repository

pytestmark = [
    pytest.mark.proof,
    # tests/service/test_pages.py asks for pages on each kind of database.
    pytest.mark.parametrize("databases", ["sqlite"], indirect=True, scope="session"),
]

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

SCHEMES = ("light", "dark")
WIDTHS = (360, 1280)
# The schemes differ in colours alone, so that one is looked at whole, and the other for those.
ALL_RULES: dict[str, object] = {"resultTypes": ["violations"]}
RULES_OF_COLOURS = {**ALL_RULES, "runOnly": {"type": "tag", "values": ["cat.color"]}}
# How each page is drawn, which it is asked for once, and by what it is judged.
LOOKS = (
    *(("light", width, ALL_RULES) for width in WIDTHS),
    ("dark", max(WIDTHS), RULES_OF_COLOURS),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium is installed; Debian's package chromium has one")
    with sync_api.sync_playwright() as playwright:
        # The sandbox of a browser needs rights that a container may lack.
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(autouse=True)
def _wait_for_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WAIT_S", "COLD_WAIT_S"):
        monkeypatch.setattr(f"gemm_tuner_service.dashboard.pictures.{name}", 60.0)


@pytest.fixture
def site(settings: Settings, engine: Engine) -> Iterator[JobSite]:
    """Yield a service that has something to show on each page."""
    repository = Repository(engine)
    for m in (1, 4, 16, 64):
        problem = replace(PROBLEM, m=Rows(low=m, high=m))
        repository.add_trial(
            make_trial(problem=problem, call_ns=600 + 8 * m, conditions=FAST_CONDITIONS)
        )
    other = make_artifact(b"another")
    repository.add_trial(replace(make_failed_trial(minute=3), artifact=other))
    cold = ExecutionContext(regime=Regime.COLD_WEIGHTS)
    repository.add_trial(replace(make_disturbed_trial(minute=4), context=cold))
    repository.add_trial(make_trial(cpu=replace(CPU, stepping=7), call_ns=1300))
    with served(settings) as client:
        made = JobSite(client, engine)
        made.submit(problem="f32 1x64x32 nk none")
        job = made.claim()
        made.report(job, tried=7, failed=2, best_ns=1500.0, over_baseline=1.25, seconds_left=15.0)
        for m, state in enumerate((JobState.DONE, JobState.FAILED, JobState.CANCELLED), start=2):
            made.submit(problem=f"f32 {m}x64x32 nk none")
            made.finish(made.claim(), state, detail="what came of it")
        made.submit(problem="f32 9x64x32 nk none")
        miss = Miss(problem=PROBLEM, class_key=CPU.class_key, context=cold)
        Misses(engine).add({replace(miss, class_key="other-1-2-avx2-0"): 5}, datetime.now(UTC))
        yield made


@contextmanager
def _opened(browser: Any, site: JobSite, **how: object) -> Iterator[Any]:  # noqa: ANN401
    context = browser.new_context(base_url=str(site.client.base_url), **how)
    try:
        yield context.new_page()
    finally:
        context.close()


def _sign_in(page: Any, site: JobSite, *scopes: Scope) -> None:  # noqa: ANN401
    page.goto("/sign-in")
    page.get_by_label("Token").fill(site.headers(*scopes)["Authorization"].partition(" ")[2])
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/")


def _all_pages(site: JobSite) -> list[str]:
    with httpx.Client(
        base_url=site.client.base_url, timeout=60, headers=site.headers(*Scope)
    ) as everything:
        found = follow_all(everything, "/")
    html = {place for place, page in found.items() if page.elements["main"]}
    return sorted(html | {"/absent-page", "/problems/unknown", "/problems?text=f32+1x1x1"})


@pytest.mark.long
@pytest.mark.timeout(600)
def test_axe_finds_nothing_on_any_page_and_each_can_be_drawn(
    browser: Any,  # noqa: ANN401
    site: JobSite,
    tmp_path: Path,
) -> None:
    places = _all_pages(site)
    assert len(places) > 15
    faults: list[str] = []
    # What axe runs is not of the pages, whose policy forbids it.
    with _opened(browser, site, bypass_csp=True) as page:
        _sign_in(page, site, *Scope)
        for number, place in enumerate(places):
            page.goto(place)
            if not page.locator("main").count():
                continue
            for summary in page.locator("summary").all():
                summary.click()
            for scheme, width, rules in LOOKS:
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": 800})
                if width == max(WIDTHS):
                    picture = page.screenshot(path=tmp_path / f"{number}.png", full_page=True)
                    assert len(picture) > 1000
                found = axe.Axe().run(page, options=rules)
                if found.violations_count:
                    faults.append(f"{place}, {scheme}, {width} wide: {found.generate_report()}")
                # Only tables and pictures may be wider than the window, and scroll alone.
                wide = page.evaluate("document.documentElement.scrollWidth")
                if wide > width:
                    faults.append(f"{place} is {wide} wide in a window of {width}")
    assert not faults, "\n".join(faults)


def test_pages_break_none_of_their_own_rules(browser: Any, site: JobSite) -> None:  # noqa: ANN401
    with _opened(browser, site) as page:
        told: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        _sign_in(page, site, *Scope)
        for place in _all_pages(site):
            page.goto(place)
        policies = [each for each in told if "Content Security Policy" in each]

    assert policies == []
    assert {url for url in asked if not url.startswith(str(site.client.base_url))} == set()


def test_pictures_have_their_colours(browser: Any, site: JobSite) -> None:  # noqa: ANN401
    seen = {}
    for scheme in SCHEMES:
        with _opened(browser, site, color_scheme=scheme, java_script_enabled=True) as page:
            page.goto("/")
            seen[scheme] = page.evaluate(
                "[...document.querySelectorAll('figure svg path')]"
                ".map(path => getComputedStyle(path).fill).filter(fill => fill !== 'none')"
            )

    assert seen["light"] != seen["dark"]
    assert "rgb(0, 105, 163)" in seen["light"]  # --tuned
    assert "rgb(86, 180, 233)" in seen["dark"]


def test_a_person_with_a_keyboard_and_without_scripts_gets_around(
    browser: Any,  # noqa: ANN401
    site: JobSite,
) -> None:
    with _opened(browser, site, java_script_enabled=False) as page:
        page.goto("/")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # skip to the content
        page.get_by_label("Problem").focus()
        page.keyboard.type(PROBLEM.text)
        page.keyboard.press("Enter")
        page.wait_for_url("**/problems/*")
        assert page.locator("h1").inner_text() == PROBLEM.text

        page.goto("/sign-in")
        page.get_by_label("Token").focus()
        page.keyboard.type(site.tuner["Authorization"].partition(" ")[2])
        page.keyboard.press("Enter")
        page.wait_for_url("**/")
        page.get_by_role("link", name="Jobs", exact=True).focus()
        page.keyboard.press("Enter")
        page.wait_for_url("**/jobs")
        assert page.locator("h1").inner_text() == "Jobs"
        assert not page.context.cookies()[0]["value"].startswith("gt_")
        assert page.context.cookies()[0]["httpOnly"]

        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/sign-in")
        assert page.context.cookies() == []
