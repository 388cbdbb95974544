"""The page as others see it: what it says, that it loads and runs nothing, and how long it is."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from html.parser import HTMLParser

import pytest
from samples import (
    CPU,
    SIBLING_CPU,
    make_answer,
    make_answers,
    make_disturbed_trial,
)

from gemm_tuner.cli.reports.page.answers import Answer, Contents, Spent, Standing, Step
from gemm_tuner.cli.reports.page.html import write_comparison, write_page
from gemm_tuner.domain.measurement import Measurement, Timing
from gemm_tuner.domain.record import Conditions, Outcome

HOSTILE = "</text></svg><script>alert(1)</script> $x$ \x1b[31m \u202e #0a0b01"
NO_PEAK = Conditions(
    peak_flop_per_s=1e-300, noise=1e300, huge_pages="", kernel_release="", microcode=""
)
MOST_ROWS = 4
OF_ANOTHER_MODEL = replace(CPU, model=3)
NOW = datetime(2026, 11, 24, 12, 0, tzinfo=UTC)


class _Reader(HTMLParser):
    """Reads a page: its elements, its attributes and the texts in its pictures and tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.in_pictures: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        self._inside = tag
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self._inside in {"td", "th"}:
            self.rows[-1][-1] += data.strip("\n")
        if self._inside == "text":
            self.in_pictures.append(data.strip())


def _page(answers: list[Answer], name: str = "some.sqlite3") -> str:
    return write_page(Contents(name=name, answers=answers), at=NOW, by="gemm-tuner 0")


@cache
def _page_of_panels() -> str:
    """Return the page of a layer with several m and a range, and of one with other types."""
    panels = [make_answer(f"f32 {m}x3072x768 nk bias") for m in (1, 2, 16, "1..64")]
    return _page([*panels, make_answer("bf16 1x8x8 nk none")])


@cache
def _page_of_cpus() -> str:
    """Return the page of two models of CPUs, one of them with two answers."""
    return _page(
        [
            make_answer(),
            make_answer("f32 1x8x8 nk none", minute=60 * 24 * 3),
            make_answer(cpu=OF_ANOTHER_MODEL),
        ]
    )


def test_a_page_says_what_was_decided_and_under_which_conditions() -> None:
    disturbed = make_disturbed_trial()
    answers = [
        make_answer(),
        make_answer("f32 1x8x8 nk none", call_ns=1200),
        make_answer("f32 2x8x8 nk none", measurement=disturbed.measurement),
        replace(make_answer("f32 4x8x8 nk none", call_ns=1000), standing=Standing.IMPORTED),
    ]
    contents = Contents(
        name="some.sqlite3",
        answers=answers,
        unanswered=2,
        outcomes=Counter({Outcome.CORRECT: 9, Outcome.OUT_OF_BOUNDS: 1}),
        spent={
            Step.CONFIRM: Spent(records=1, seconds=30.0),
            Step.PROOF: Spent(records=3, seconds=90.0),
        },
    )

    page = write_page(contents, at=NOW, by="gemm-tuner 0")

    assert "4 problems on 1 kind of CPU, with 4 answers: 1 tuned, 2 tie, 1 baseline." in page
    assert "1 answer decides nothing, because the measurement is not believed (1 disturbed)" in page
    assert "1 answer of these: imported, measured elsewhere. No kernel is served" in page
    assert "2 more searches left no confirmed kernel" in page
    assert "Of 10 recorded trials, 1 failed and are kept as failures: 1 out of bounds." in page
    all_rows = _Reader(page).rows
    rows = dict(row for row in all_rows if len(row) == 2)
    assert rows["measured"] == "2026-11-20 12:00 to 2026-11-20 12:00 UTC"
    assert rows["compilers"] == "gcc 12.2.0 -O3"
    assert rows["baselines"] == "onednn 3.2.0 (4)"
    assert rows["libraries raced for the baseline"] == "not recorded"
    # Time is told by what ended it.
    assert [row for row in all_rows if len(row) == 4][-3:] == [
        ["a candidate was proved", "3", "1 min 30 s", "75.0%"],
        ["a confirmation was timed", "1", "30 s", "25.0%"],
        ["all", "4", "2 min 0 s", "100.0%"],
    ]


def test_each_answer_has_its_figures_in_a_row_and_its_name_in_the_plot() -> None:
    read = _Reader(_page([make_answer()]))

    [row] = [row for row in read.rows if row[0].startswith("128x3072x768") and len(row) > 5]
    assert row[1:6] == ["tuned", "1.250", "1.250 to 1.250", "800 ns", "1 µs"]
    assert row[9] == "onednn 3.2.0"
    assert row[10].startswith("avx512_f32_8x48 mc128")
    assert row[7] == "75.5%"
    assert "of the peak of arithmetic" in read.in_pictures
    assert "128x3072x768 bias+gelu_erf" in read.in_pictures
    assert "onednn 3.2.0" in read.in_pictures


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    read = _Reader(_page_of_panels())

    assert read.elements["svg"] > 6
    assert not set(read.elements) & {"script", "link", "img", "iframe", "object", "image", "base"}
    for name, value in read.attributes:
        assert not name.startswith("on")
        if name in {"href", "xlink:href", "src"}:
            assert value.startswith("#")
        assert "url(http" not in value


def test_what_is_in_a_database_is_text_and_nothing_else() -> None:
    other = replace(SIBLING_CPU, brand="another")
    answer = make_answer(cpu=replace(other, brand=HOSTILE), toolchain=HOSTILE, generator=HOSTILE)
    measured = replace(answer.measured, baseline=HOSTILE)
    hostile = replace(
        answer, measured=measured, verdict=replace(answer.verdict, measurement=measured)
    )
    page = _page([hostile, make_answer()], name=HOSTILE)
    read, clean = _Reader(page), _Reader(_page([make_answer(cpu=other), make_answer()]))

    assert read.elements == clean.elements
    assert "<script" not in page
    assert not set(page) & {"\x1b", "\u202e"}
    cells = [cell for row in read.rows for cell in row]
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    # The CPU, the generator, the compiler and the baseline, as they are written.
    assert sum(shown in cell for cell in cells) >= 4
    assert "</text></svg><sc…" in read.in_pictures


def test_figures_that_nobody_measured_do_not_stop_a_page() -> None:
    one_ns = Timing(calls_per_sample=1, samples_ns=(1, 1))
    ages = Timing(calls_per_sample=1, samples_ns=(2**52, 2**52))
    fast = Measurement(candidate=one_ns, baseline="", baseline_timing=ages)
    slow = Measurement(candidate=ages, baseline="\u4f60\u597d \U0001f600", baseline_timing=one_ns)
    answers = [
        make_answer("f32 0x0x0 nk none", measurement=fast),
        make_answer("f32 0x8x8 nk none", measurement=slow),
        make_answer("f32 1x8x8 nk none", measurement=slow),
        make_answer("f32 2x8x8 nk none", measurement=fast, conditions=NO_PEAK),
        make_answer("f32 3x8x8 nk none", measurement=fast),
    ]

    read = _Reader(_page(answers))

    assert "\u4f60\u597d \U0001f600" in read.in_pictures
    rows = {row[0]: row for row in read.rows if len(row) == 15}
    assert rows["0x0x0"][6:9] == ["0", "", "0"]
    assert rows["2x8x8"][7] == ""


def test_colours_are_those_of_the_page() -> None:
    page = _page(make_answers(1))

    assert "#0a0b0" not in page
    assert "var(--tuned)" in page


def test_without_a_recorded_peak_there_is_no_plot_over_it() -> None:
    page = _page([replace(make_answer(), conditions=None)])

    assert "no peak was recorded beside these measurements" in page
    assert "of the peak of arithmetic" not in _Reader(page).in_pictures


def test_there_is_no_mean_over_different_baselines() -> None:
    answer = make_answer("f32 1x8x8 nk none")
    measured = replace(answer.measured, baseline="mkl 2026.0")
    page = _page([make_answer(), replace(answer, measured=measured)])

    assert "1.250 times the speed of onednn 3.2.0 (1 layer)" in page
    assert "1.250 times the speed of mkl 2026.0 (1 layer)" in page


def test_speed_over_m_is_drawn_of_layers_with_several_m() -> None:
    with_two = _Reader(_page([make_answer(f"f32 {m}x3072x768 nk bias") for m in (1, 2, "1..64")]))
    with_three = _Reader(_page_of_panels())

    assert _rows_over_m(with_two) == []
    assert "m, rows of x" not in with_two.in_pictures
    assert [row[1] for row in _rows_over_m(with_three)] == ["1", "2", "16"]
    assert "m, rows of x" in with_three.in_pictures
    assert "one library for a range" not in with_three.in_pictures


def _rows_over_m(read: _Reader) -> list[list[str]]:
    return [row for row in read.rows if row[0] == "f32 3072x768 bias, hot, 1 thread"]


def test_a_library_for_a_range_is_drawn_beside_the_kernels_of_each_m() -> None:
    first, *others = (make_answer(f"f32 {m}x3072x768 nk bias") for m in (1, 2, 16))

    read = _Reader(_page([first, *(replace(one, in_range_ns=1000.0) for one in others)]))

    assert [row[-1] for row in _rows_over_m(read)] == ["", "1 µs", "1 µs"]
    assert "one library for a range" in read.in_pictures


def test_each_cpu_has_a_row_with_the_date_of_its_last_answer() -> None:
    rows = {row[0]: row for row in _Reader(_page_of_cpus()).rows if len(row) == 9}

    assert rows[CPU.exact_key][2:] == ["2", "2", "2", "0", "0", "0", "2026-11-23"]
    assert rows[OF_ANOTHER_MODEL.exact_key][2:] == ["1", "1", "1", "0", "0", "0", "2026-11-20"]


def test_a_plot_of_too_many_draws_some_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemm_tuner.cli.reports.page.groups.MOST_ROWS", MOST_ROWS)
    answers = [
        make_answer(f"f32 {1 + number}x8x8 nk none", call_ns=500 + number)
        for number in range(MOST_ROWS + 5)
    ]

    page = _page(answers)

    assert f"Drawn are {MOST_ROWS} of {MOST_ROWS + 5}, taken evenly" in page
    read = _Reader(page)
    names = [text for text in read.in_pictures if text.endswith("x8x8")]
    assert len(names) == MOST_ROWS
    assert {names[0], names[-1]} == {"1x8x8", f"{MOST_ROWS + 5}x8x8"}
    assert sum(row[0].endswith("x8x8") and len(row) == 15 for row in read.rows) == MOST_ROWS + 5


@pytest.mark.proof
def test_two_thousand_problems_stay_below_two_megabytes() -> None:
    """So ten thousand stay below ten: each has the same mark in each picture."""
    page = _page(make_answers(2_000))

    assert len(page.encode()) < 2e6
    assert "2000 answers" in page


def test_two_databases_are_compared_by_their_ratios_alone() -> None:
    first = Contents(
        name="old",
        answers=[
            make_answer(),
            make_answer("f32 1x8x8 nk none"),
            make_answer("f32 2x8x8 nk none"),
        ],
    )
    other = make_answer("f32 1x8x8 nk none", call_ns=1100, minute=9)
    beside_mkl = replace(other, measured=replace(other.measured, baseline="mkl 2026.0"))
    second = Contents(
        name="new",
        answers=[make_answer(cpu=SIBLING_CPU), beside_mkl, make_answer("f32 4x8x8 nk none")],
    )

    page = write_comparison(first, second, at=NOW, by="gemm-tuner 0")

    assert "2 questions (a problem, number of threads and regime) have an answer in both" in page
    assert "1 differs, 1 agree. 1 more answer in old alone, and 1 in new alone." in page
    assert "not set against each other" in page
    rows = {row[0]: row for row in _Reader(page).rows if len(row) == 14}
    assert "1 pair stands beside different baselines" in page
    assert "1 pair was measured on different kinds of CPU" in page
    assert rows["1x8x8"][1] == "differ, other baseline"
    assert rows["1x8x8"][2:6] == ["tuned", "1.250", "1.250 to 1.250", "onednn 3.2.0"]
    assert rows["1x8x8"][8:12] == ["baseline", "0.909", "0.909 to 0.909", "mkl 2026.0"]
    assert rows["128x3072x768 bias+gelu_erf"][1] == "agree, other CPU"


def test_a_measurement_that_both_have_is_told_as_one() -> None:
    contents = Contents(name="some", answers=[make_answer()])

    page = write_comparison(contents, contents, at=NOW, by="gemm-tuner 0")

    assert "1 pair is of one measurement, which is in both databases." in page


def test_cpus_have_the_shortest_name_that_tells_them_apart() -> None:
    titles = ("f32, hot, 1 thread, AuthenticAMD-1a-2<", "f32, hot, 1 thread, AuthenticAMD-1a-3<")
    assert all(title in _page_of_cpus() for title in titles)


def test_databases_without_a_common_question_say_so() -> None:
    first = Contents(name="some", answers=[make_answer()])
    second = Contents(name="some", answers=[make_answer("f32 1x8x8 nk none")])

    page = write_comparison(first, second, at=NOW, by="gemm-tuner 0")

    assert "0 questions (a problem" in page
    assert "1 more answer in some (first) alone" in page
