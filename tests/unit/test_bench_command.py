import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from gemm_tuner.cli import bench
from gemm_tuner.cli.arguments.layers import Layer
from gemm_tuner.cli.main import run
from gemm_tuner.cli.reports.bench_report import WHERE_FASTEST, BenchRow, means_of
from gemm_tuner.cli.reports.roofline_plot import KERNEL, PlotLine, draw, write_plot
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.measurement import Interference, Measurement, Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Conditions
from gemm_tuner.domain.verdict import Basis, Decision, Verdict
from gemm_tuner.errors import BaselineMissing, InvalidSetting, TrialFailed
from gemm_tuner.store.sql.database import open_database

SHAPES = "name,m,n,k,epilogue\nfirst,1,2,3,none\nsecond,4,5,6,none\nthird,7,8,9,none\n"
LAYER = Layer(name="first", problem=Problem.parse("f32 1x2x3 nk bias"))
ANSWER_IS_NO = 1
CONDITIONS = Conditions(
    peak_flop_per_s=1e11, noise=0.01, huge_pages="always", kernel_release="6", microcode="0x1"
)
DISTURBED_BY_ANOTHER = Interference(disturbed_rounds=0.9, stolen=0.0, others=1.5)


def _timing(time_ns: int) -> Timing:
    return Timing(calls_per_sample=1, samples_ns=(time_ns, time_ns))


def _row(layer: Layer, *, decision: Decision = Decision.TIE, **times_ns: int) -> BenchRow:
    """Return a row whose kernel takes 100 ns a call, and the baselines what is given."""
    measurements = tuple(
        Measurement(candidate=_timing(100), baseline=f"{name} 3", baseline_timing=_timing(time_ns))
        for name, time_ns in times_ns.items()
    )
    return BenchRow(
        layer=layer,
        verdict=Verdict(
            problem=layer.problem,
            cpu_key="some",
            context=ExecutionContext(),
            decision=decision,
            basis=Basis.MEASURED,
            complete=True,
            measurement=Evidence.of(
                Measurement(
                    candidate=_timing(100), baseline="onednn 2", baseline_timing=_timing(120)
                )
            ),
        ),
        measurements=measurements,
        roofline=_timing(50),
        conditions=CONDITIONS,
        toolchain="gcc 12.2",
        product_only=frozenset({"openblas 3"}),
        left_out={"mkl": "mkl is not installed."},
    )


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (
            TrialFailed("the server ended."),
            ("second, hot, 1 thread: the server ended.", ["first", "third"]),
        ),
        (
            BaselineMissing("no baseline can be used."),
            ("second, hot, 1 thread: no baseline can be used.", ["first", "third"]),
        ),
        (KeyboardInterrupt(), ("Stopped", ["first"])),
    ],
)
def test_rows_survive_the_failure_of_one_layer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    told: tuple[str, list[str]],
) -> None:
    def time_or_fail(_setting: object, layer: Layer, _context: ExecutionContext) -> BenchRow:
        if layer.name == "second":
            raise failure
        return _row(layer, onednn=100)

    monkeypatch.setattr(bench, "_time_layer", time_or_fail)
    shapes = tmp_path / "shapes.csv"
    shapes.write_text(SHAPES)

    database = f"sqlite:///{tmp_path}/store.sqlite3"
    open_database(database).dispose()
    code = run(["bench", "--shapes", str(shapes), "--db", database, "--json"])

    captured = capsys.readouterr()
    assert code == ANSWER_IS_NO
    message, names = told
    assert message in captured.err
    assert [row["name"] for row in json.loads(captured.out)["layers"]] == names


def test_unknown_baseline_is_refused_before_anything_is_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(["bench", "1", "2", "3", "--baseline", "blas"])

    assert code == 2
    assert "'blas' is not known; use one of: onednn, mkl" in capsys.readouterr().err


def test_one_thread_is_no_baseline_for_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["bench", "1", "2", "3", "--baseline", "one-thread"])

    assert code == 2
    assert "use it with --threads 2 or more" in capsys.readouterr().err


def test_best_library_is_not_a_kernel_of_one_thread() -> None:
    shared = _row(LAYER, onednn=110)
    alone = Measurement(candidate=_timing(100), baseline="one-thread", baseline_timing=_timing(90))
    row = replace(shared, measurements=(*shared.measurements, alone))

    assert row.best.baseline == "onednn 3"
    assert row.facts()["best_baseline"] == "onednn 3"
    assert "slower than one thread" in row.cells()[0][-1]
    assert "slower than one thread" not in shared.cells()[0][-1]


def test_each_reason_to_leave_a_baseline_out_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_and_tell(setting: bench._Bench, layer: Layer, context: ExecutionContext) -> BenchRow:
        bench._tell_left_out(setting, layer, context, {"mkl": "mkl is not installed."})
        return _row(layer, onednn=100)

    monkeypatch.setattr(bench, "_time_layer", time_and_tell)
    shapes = tmp_path / "shapes.csv"
    shapes.write_text(SHAPES)

    url = f"sqlite:///{tmp_path}/store.sqlite3"
    open_database(url).dispose()

    run(["bench", "--shapes", str(shapes), "--db", url])

    assert capsys.readouterr().err.count("mkl is left out: mkl is not installed.") == 1


def test_facts_name_each_baseline_and_the_best() -> None:
    facts = _row(LAYER, onednn=110, openblas=90).facts()

    assert [one["baseline"] for one in facts["baselines"]] == ["onednn 3", "openblas 3"]
    assert [one["computes"] for one in facts["baselines"]] == ["layer", "product"]
    assert [one["ratio"]["median"] for one in facts["baselines"]] == pytest.approx([1.1, 0.9])
    assert facts["best_baseline"] == "openblas 3"
    assert facts["left_out"] == {"mkl": "mkl is not installed."}


@pytest.mark.parametrize(
    ("decision", "onednn", "openblas", "refuted"),
    [
        (Decision.TUNED, 95, 100, True),
        (Decision.TUNED, 98, 100, False),
        (Decision.TUNED, 110, 50, False),  # another baseline than that of the verdict
        (Decision.TUNED, None, 100, None),  # that of the verdict was not timed
        (Decision.TIE, 95, 100, False),
    ],
)
def test_only_the_baseline_of_a_verdict_refutes_it(
    decision: Decision, onednn: int | None, openblas: int, *, refuted: bool | None
) -> None:
    times_ns = {"openblas": openblas} | ({"onednn": onednn} if onednn else {})
    row = _row(LAYER, decision=decision, **times_ns)

    assert row.is_refuted is refuted


def test_means_are_of_the_layers_that_a_baseline_was_timed_for() -> None:
    rows = [_row(LAYER, onednn=200, openblas=100), _row(LAYER, onednn=800)]

    means = {mean.baseline: mean for mean in means_of(rows)}

    assert {name: mean.layers for name, mean in means.items()} == {
        "onednn 3": 2,
        "openblas 3": 1,
        f"openblas 3{WHERE_FASTEST}": 1,
    }
    assert means["onednn 3"].value == pytest.approx(4.0)
    assert means["openblas 3"].value == pytest.approx(1.0)


def test_a_layer_that_is_not_believed_is_in_no_mean() -> None:
    good, disturbed = _row(LAYER, onednn=200), _row(LAYER, onednn=90_000)
    disturbed = replace(
        disturbed,
        measurements=tuple(
            replace(one, interference=DISTURBED_BY_ANOTHER) for one in disturbed.measurements
        ),
    )

    [mean] = means_of([good, disturbed])

    assert mean.value == pytest.approx(2.0)
    assert (mean.layers, mean.left_out) == (1, 1)
    assert "(1 layer, 1 left out: not believed)" in mean.text
    assert "not believed: disturbed: in 90% of the rounds" in disturbed.cells()[1][-1]
    [nothing] = means_of([disturbed])
    assert nothing.value is None
    assert "none of onednn 3 (0 layers, 1 left out" in nothing.text


def test_a_disturbed_measurement_refutes_nothing() -> None:
    row = _row(LAYER, decision=Decision.TUNED, onednn=50)
    of_disturbed = replace(row.measurements[0], interference=DISTURBED_BY_ANOTHER)

    assert row.is_refuted
    assert replace(row, measurements=(of_disturbed,)).is_refuted is None


def test_share_of_the_roofline_is_of_the_same_rounds() -> None:
    row = replace(
        _row(LAYER),
        roofline=Timing(calls_per_sample=1, samples_ns=(50, 150, 200)),
        measurements=(
            Measurement(
                candidate=Timing(calls_per_sample=2, samples_ns=(200, 400, 800)),
                baseline="onednn 3",
                baseline_timing=Timing(calls_per_sample=1, samples_ns=(100, 100, 1000)),
            ),
        ),
    )

    assert row.share_of_roofline == pytest.approx(0.5)
    assert row.facts()["baselines"][0]["share_of_roofline"] == pytest.approx(0.5)


def test_share_of_a_roofline_that_was_timed_in_fewer_rounds_is_of_those() -> None:
    row = replace(_row(LAYER, onednn=100), roofline=Timing(calls_per_sample=1, samples_ns=(50,)))
    assert len(row.best.candidate.samples_ns) > 1

    assert row.share_of_roofline == pytest.approx(0.5)
    assert row.facts()["baselines"][0]["share_of_roofline"] == pytest.approx(0.5)


def _spread(spread_ns: int, *, of_ns: int = 1_000_000) -> Measurement:
    samples_ns = tuple(of_ns + spread_ns * (turn % 3) for turn in range(30))
    return Measurement(
        candidate=Timing(calls_per_sample=1, samples_ns=(of_ns,) * 30),
        baseline="onednn 3",
        baseline_timing=Timing(calls_per_sample=1, samples_ns=samples_ns),
    )


@pytest.mark.parametrize(
    ("measurements", "pairs"),
    [
        ([_spread(20_000)], 0),
        ([_spread(200_000)], 120),
        # The fastest baseline is surely known: how slow another one is matters less.
        ([_spread(20_000), _spread(3_000_000, of_ns=5_000_000)], 0),
        # A round takes 0.2 s and more.
        ([_spread(20_000_000, of_ns=100_000_000)], 90),
        ([], 0),
    ],
)
def test_more_pairs_are_taken_where_noise_hides_the_ratio(
    measurements: list[Measurement], pairs: int
) -> None:
    assert bench.pairs_in_noise(measurements) == pairs


def test_plot_has_a_mark_for_each_runner(tmp_path: Path) -> None:
    picture = tmp_path / "bench.svg"

    write_plot(picture, [_row(LAYER, onednn=100, openblas=200), _row(LAYER, onednn=40)])

    drawing = ET.parse(picture).getroot()  # noqa: S314 - written above
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    kernels = list(drawing.iter("{http://www.w3.org/2000/svg}circle"))
    assert texts.count("first") == texts.count("1x2x3") == 2
    assert texts.count("f32, hot, 1 thread: speed over the roofline") == 1
    assert {"onednn 3", "openblas 3", "120%"} <= set(texts)
    assert len(kernels) == 2 + 1  # and one in the legend


def test_plot_of_several_contexts_names_the_one_of_each_line() -> None:
    shares = {KERNEL: 1.0, "onednn 3": 0.9}
    lines = [
        PlotLine(name="first", sizes="1x2x3", context=context, shares=shares)
        for context in ("f32, hot, 1 thread", "f32, hot, 2 threads")
    ]

    drawing = draw(lines)

    assert ">1x2x3, f32, hot, 1 thread<" in drawing
    assert ">1x2x3, f32, hot, 2 threads<" in drawing


def test_plot_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="cannot be written"):
        write_plot(tmp_path / "missing" / "bench.svg", [_row(LAYER, onednn=100)])


def test_plot_in_a_log_leaves_what_was_there(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("ab") as opened:
        write_plot(Path(f"/dev/fd/{opened.fileno()}"), [_row(LAYER, onednn=100)])
    assert log.read_text().startswith("before\n<svg")
