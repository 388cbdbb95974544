"""Figures on pages: what pictures and their tables say, and which picture a page shows when."""

from dataclasses import replace

import pytest
from gemm_tuner_service.dashboard.artist import Artist, DrawingFailed
from job_site import JobSite
from pages import read_page
from samples import CPU, PROBLEM, make_trial, make_trial_of

from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.verdicts.figures import Standing

pytestmark = pytest.mark.usefixtures("patient")

KEY = problem_id(PROBLEM)


def test_the_outermost_steps_of_speed_say_what_they_hold(site: JobSite) -> None:
    repository = Repository(site.engine)
    repository.add_trial(make_trial_of(1, call_ns=20))
    repository.add_trial(make_trial_of(64, call_ns=9000))

    for path in ("/", f"/cpus/{CPU.exact_key}"):
        page = read_page(site.client, path)
        counted = {row[0]: row[1:] for row in page.rows if len(row) == len(Standing) + 1}
        assert counted["7.029 and more"][0] == "1"
        assert counted["below 0.142"][2] == "1"
        assert counted["1.221 to 1.284"][0] == "1"
        assert "A bar that ends at 7.39 also has all that is faster" in page.text


def test_cpus_of_one_brand_keep_it_and_are_told_apart(site: JobSite) -> None:
    other = replace(CPU, stepping=8)
    unnamed = replace(CPU, brand=" ", stepping=9)
    for cpu in (other, unnamed):
        Repository(site.engine).add_trial(make_trial(cpu=cpu))

    page = read_page(site.client, "/cpus")

    names = {row[0] for row in page.rows}
    assert {f"{CPU.exact_key} {CPU.brand}", f"{other.exact_key} {CPU.brand}"} < names
    assert unnamed.exact_key in names
    drawn = page.answer.text.partition("<svg")[2].partition("</svg>")[0]
    assert all(cpu.exact_key in drawn for cpu in (CPU, other, unnamed))
    assert read_page(site.client, f"/cpus/{unnamed.exact_key}").text.count(unnamed.exact_key) >= 2


def test_a_cache_of_unknown_size_is_none_of_nothing(site: JobSite) -> None:
    cpu = replace(CPU, caches=replace(CPU.caches, l3_bytes=0))
    Repository(site.engine).add_trial(make_trial(cpu=cpu))

    page = read_page(site.client, f"/cpus/{cpu.exact_key}")

    assert "L1d 48.0 KiB, L2 1.0 MiB; L3 of its group unknown" in page.text


def test_a_page_does_not_wait_long_for_its_pictures(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = replace(CPU, stepping=11)
    Repository(site.engine).add_trial(make_trial(cpu=cpu))
    place = f"/cpus/{cpu.exact_key}"
    with monkeypatch.context() as impatient:
        impatient.setattr("gemm_tuner_service.dashboard.pictures.WAIT_S", 0.0)
        early = read_page(site.client, place)
    later = read_page(site.client, place)

    assert "A picture is being drawn: look again" in early.text
    assert later.elements["svg"] == 1


def test_a_picture_that_is_not_ready_is_not_that_of_another_place(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(CPU, stepping=13)
    repository = Repository(site.engine)
    repository.add_trial(make_trial_of(1, call_ns=500))
    for m, call_ns in ((1, 500), (128, 1300)):
        repository.add_trial(replace(make_trial_of(m, call_ns), cpu=other))

    drawn = read_page(site.client, f"/problems/{KEY}?cpu={CPU.exact_key}")
    with monkeypatch.context() as impatient:
        impatient.setattr("gemm_tuner_service.dashboard.pictures.WAIT_S", 0.0)
        early = read_page(site.client, f"/problems/{KEY}?cpu={other.exact_key}")

    assert (drawn.elements["svg"], early.elements["svg"]) == (2, 0)
    assert early.text.count("A picture is being drawn: look again") == 2


def test_what_cannot_be_drawn_is_left_out(site: JobSite, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_figures: object) -> str:
        raise DrawingFailed("not today")

    monkeypatch.setattr(Artist, "draw", fail)
    cpu = replace(CPU, stepping=12)
    Repository(site.engine).add_trial(make_trial(cpu=cpu))

    page = read_page(site.client, f"/cpus/{cpu.exact_key}")

    assert not page.elements["svg"]
    assert page.elements["table"] >= 3


def test_without_matplotlib_pages_have_their_tables(
    site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner_service.dashboard.pictures.can_draw", lambda: False)

    page = read_page(site.client, "/")

    assert not page.elements["svg"]
    assert page.elements["table"] >= 3
