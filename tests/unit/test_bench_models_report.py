"""The table and the page of `gemm-tuner bench-models`."""

from dataclasses import replace
from pathlib import Path

import pytest
from model_bench import CASE, measured_by, with_times
from restricted import full_disk

from gemm_tuner.cli.reports.bench_models_report import (
    mean_text,
    means,
    ordered,
    print_runs,
    why_slower,
)
from gemm_tuner.cli.reports.models_page import BEGIN, END, check_page, write_page
from gemm_tuner.domain.model_run import ModelLimit, ModelRun, TimeShares
from gemm_tuner.errors import InvalidSetting


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> ModelRun:
    return measured_by(tmp_path_factory.mktemp("measured"))


def test_the_slower_rows_come_first_and_say_where_the_time_goes(
    measured: ModelRun, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = replace(with_times(measured, enable=250), case=replace(CASE, model="mixer"))

    print_runs([measured, slower])

    printed = capsys.readouterr().out.splitlines()
    assert "mixer f32, 1 thread, batch 1" in printed[2]
    assert "0.800" in printed[2]
    assert (
        "3 of 4 layers taken; 50% of the time in these, 20% in layers left, "
        "30% outside of layers" in printed[2]
    )
    assert "taken" not in printed[3]
    assert printed[-1] == (
        "geometric mean, f32, 1 thread, batch 1: 1.265 times the speed of the best of the others "
        "(2 models: dlrm, mixer)"
    )


def test_layers_left_that_the_profiler_does_not_show_are_not_said_to_take_no_time(
    measured: ModelRun,
) -> None:
    shares = TimeShares(taken=0.66, left=0.0)
    slower = with_times(measured, enable=250)
    hidden = replace(
        slower,
        ways=tuple(replace(way, shares=shares) if way.is_ours else way for way in slower.ways),
    )

    assert why_slower(hidden) == (
        "3 of 4 layers taken; 66% of the time in these, 34% in layers left and outside of layers, "
        "which the profiler does not tell apart here"
    )


def test_means_are_of_runs_that_were_measured_alike_and_are_believed(measured: ModelRun) -> None:
    disturbed = replace(
        measured, conditions=replace(measured.conditions, stolen=0.5), case=replace(CASE, model="a")
    )
    fewer = replace(measured, ways=measured.ways[1:])
    ours_died = (*measured.ways[:2], replace(measured.ways[2], reason="it died"))
    failed = replace(measured, ways=ours_died, case=replace(CASE, model="b"))

    found = means([measured, disturbed, fewer, failed])

    assert [(len(one.models), one.left_out, one.failed) for one in found] == [
        (1, 1, 1),
        (1, 0, 0),
    ]
    assert mean_text(found[0]) == (
        "geometric mean, f32, 1 thread, batch 1: 2.000 times the speed of the best of the others "
        "(dlrm; 1 left out: not believed; 1 left out: ours or all others failed)"
    )
    assert means([failed]) == []
    assert [mean.value for mean in found] == [pytest.approx(2.0)] * 2
    assert disturbed.doubt is not None
    assert "the hypervisor gave 50%" in disturbed.doubt


def test_a_ratio_is_not_believed_where_another_way_lacked_memory(measured: ModelRun) -> None:
    first, *others = measured.ways
    lacked = replace(
        first, samples_ns=(), disturbed=(), reason="memory is short", may_pass=True, notes=()
    )

    run = replace(measured, ways=(lacked, *others))

    assert run.ratio is not None
    assert run.doubt == (f"not beside {first.way}, which may be faster: see why that is no result")
    assert [(one.models, one.left_out) for one in means([run])] == [((), 1)]
    broken = replace(run, ways=(replace(lacked, may_pass=False), *others))
    assert broken.doubt is None


def test_a_row_over_the_limit_says_so(
    measured: ModelRun, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = ModelLimit(
        way="compile", outside_s=3e-8, layers_s=6e-8, peak_flop_per_s=1e11, read_bytes_per_s=1e10
    )
    told = "over the limit: ours takes less outside of layers than the others"

    print_runs([replace(measured, limit=limit)])  # 90 ns of 100
    assert told not in capsys.readouterr().out
    print_runs([replace(measured, limit=replace(limit, layers_s=9e-8))])
    assert f"120%   {told}" in capsys.readouterr().out


def test_runs_without_a_ratio_come_last(measured: ModelRun) -> None:
    alone = replace(measured, ways=measured.ways[:2])

    assert ordered([alone, measured]) == [measured, alone]


def test_the_page_keeps_what_a_person_wrote(measured: ModelRun, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    page = tmp_path / "models.md"
    page.write_text(f"# Mine\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    slower = replace(with_times(measured, enable=250), case=replace(CASE, model="mi|xer"))

    write_page(page, [measured, slower])
    text = page.read_text()

    assert text.startswith(f"# Mine\n\n{BEGIN}\n")
    assert text.endswith(f"{END}\n\nThe end.\n")
    assert "old" not in text
    assert (
        "| mi\\|xer f32, 1 thread, batch 1 | 400 ns | 200 ns | 250 ns | **0.800 (compile)** |"
        in text
    )
    assert "  - left: 1: a tie." in text
    assert measured.conditions.cpu_key in text
    assert "prefers-color-scheme:dark" in (tmp_path / "models.svg").read_text()
    write_page(page, [measured, slower])
    assert page.read_text() == text


def test_the_page_says_how_near_the_outputs_of_quantised_models_are(
    measured: ModelRun, tmp_path: Path
) -> None:
    page = tmp_path / "models.md"
    quantised = replace(measured, case=replace(CASE, dtype="int8"))

    write_page(page, [measured, quantised])

    _before, heading, after = page.read_text().partition("### Outputs of quantised models\n")
    assert heading
    assert [line for line in after.splitlines() if line.startswith("| dlrm")] == [
        "| dlrm int8, 1 thread, batch 1 | 75.0%, 1.0e-06 | 75.0%, 1.0e-06 | 75.0%, 1.0e-06 |"
    ]


def test_a_page_without_the_marks_is_not_written(measured: ModelRun, tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text("# Mine\n")

    with pytest.raises(InvalidSetting, match="has no lines"):
        write_page(page, [measured])
    assert page.read_text() == "# Mine\n"
    page.write_text(text := f"{BEGIN}\n{END}\n" * 2)
    with pytest.raises(InvalidSetting, match="more than once"):
        write_page(page, [measured])
    assert page.read_text() == text


def test_a_page_stays_where_the_disk_is_full(measured: ModelRun, tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(text := f"# Mine\n{BEGIN}\n{END}\n" + "What a person wrote.\n" * 100)
    alone = replace(measured, ways=measured.ways[:2])  # has no plot

    with full_disk(1024), pytest.raises(InvalidSetting, match="File too large"):
        write_page(page, [alone])

    assert page.read_text() == text


@pytest.mark.parametrize(("page", "out"), [("a.svg", "b.json"), ("a.md", "a.svg")])
def test_a_plot_takes_the_place_of_no_other_file(page: str, out: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")

    with pytest.raises(InvalidSetting, match=r"its plot would take the place of .*a\.svg"):
        check_page(tmp_path / page, beside=tmp_path / out, db="sqlite://")


def test_a_plot_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot = tmp_path / "a.svg"
    for leads_to, why in (("a.svg", "Too many levels"), ("database", "a file of the database")):
        plot.unlink(missing_ok=True)
        plot.symlink_to(leads_to)
        with pytest.raises(InvalidSetting, match=rf"a\.svg cannot be written: .*{why}"):
            check_page(
                tmp_path / "a.md", beside=tmp_path / "b.json", db=f"sqlite:///{tmp_path}/database"
            )
