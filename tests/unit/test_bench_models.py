"""`gemm-tuner bench-models` without PyTorch: the processes of ways are small scripts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from model_bench import CASE, a_way, measured_by, plan_of, with_times

from gemm_tuner.cli import bench_models as command
from gemm_tuner.cli.main import run
from gemm_tuner.domain.model_run import (
    LayerCalls,
    ModelCase,
    ModelLimit,
    ModelRun,
    TimeShares,
    WayRun,
)
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.models.limit import Roof
from gemm_tuner.models.measure import OnStep, Plan, measure_case
from gemm_tuner.models.results import Results, standing
from gemm_tuner.models.row import Precision
from gemm_tuner.models.table import MODELS, PRECISIONS, WAYS


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> ModelRun:
    return measured_by(tmp_path_factory.mktemp("measured"))


def test_each_way_is_timed_in_each_round_and_ours_stands_beside_the_best(
    measured: ModelRun,
) -> None:
    assert {one.way: one.samples_ns for one in measured.ways} == {
        "eager": (400, 400, 400),
        "compile": (200, 200, 200),
        "enable": (100, 100, 100),
    }
    assert measured.rival is not None
    assert measured.rival.way == "compile"
    assert measured.ratio is not None
    assert measured.ratio.median == 2.0


def test_a_sample_that_a_neighbour_slowed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.models.calm._PAUSE_S", 0.0)

    done = measure_case(CASE, plan_of(tmp_path, a_way("uneven"), a_way("enable", is_ours=True)))

    assert done.ways[0].samples_ns == (200, 200, 200)  # and 400 every second time
    assert done.doubt is None


@pytest.mark.parametrize("ours", ["enable", "slowed"])
def test_a_way_that_stays_slow_is_not_believed(
    ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.models.calm._PAUSE_S", 0.0)
    other = "eager" if ours == "slowed" else "slowed"

    done = measure_case(CASE, plan_of(tmp_path, a_way(other), a_way(ours, is_ours=True), rounds=4))

    by_name = {one.way: one.samples_ns for one in done.ways}
    assert by_name["slowed"] == (500, 1000, 1000, 1000)
    assert done.doubt is not None
    assert "in 3 of 4 rounds slowed took more than 1.25 times its least" in done.doubt


def test_a_way_that_fails_is_a_row_with_its_reason_and_stops_no_other(tmp_path: Path) -> None:
    answers = ("babbles", "mistakes", "floods")
    ways = ("eager", "hangs", "dies", "killed", "refuses", "off", *answers, "stops")
    absent = a_way("absent", wheel="no-such-wheel")

    done = measure_case(CASE, plan_of(tmp_path, *map(a_way, ways), absent), lambda *_step: None)

    found = {one.way: one for one in done.ways}
    assert found["eager"].is_result
    assert found["eager"].samples_ns == (400, 400, 400)
    for way, why in {
        "hangs": "it took longer than 5 s",
        "dies": "SIGABRT: the library is out of luck",
        "killed": "its process ended with signal SIGKILL",
        "refuses": "OpConversionFailure: no such operator",
        "off": "its output is off by 5.0e-01 of the norm; 1e-04 is tolerated in f32",
        "babbles": "its answer is not understood: b'not JSON'",
        "mistakes": "its answer is not understood: b'{\"looked\": {}}'",
        "floods": "its answer is longer than 1048576 bytes",
        "stops": "its process ended with exit code 7",
        "absent": 'no-such-wheel is not installed: pip install "gemm-tuner[torch]"',
    }.items():
        assert why in found[way].reason
        assert not found[way].samples_ns
    assert found["off"].error == 0.5
    assert {one.way for one in done.ways if one.may_pass} == {"hangs", "killed"}


def test_tuning_that_fails_is_noted_and_the_way_is_timed(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, a_way("stops", is_ours=True), budget_s=1.0)
    refuses = replace(a_way("refuses", is_ours=True))

    done = measure_case(CASE, replace(plan, ways=(*plan.ways, refuses)))

    by_name = {one.way: one for one in done.ways}
    assert not by_name["stops"].notes
    assert by_name["refuses"].notes == (
        "its layers were not all tuned: OpConversionFailure: no such operator",
    )


def test_a_way_that_memory_lacks_for_is_not_started(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, a_way("huge"), a_way("eager"))

    done = measure_case(CASE, plan)

    assert done.ways[0].is_result
    assert "its process takes 2560.0 GiB, but" in done.ways[1].reason
    assert done.ways[1].may_pass


def test_a_precision_that_a_way_lacks_is_its_reason(tmp_path: Path) -> None:
    way = replace(a_way("eager"), unable={"bf16": "it has no bf16"})

    done = measure_case(replace(CASE, dtype="bf16"), plan_of(tmp_path, way, a_way("compile")))

    assert done.ways[0].reason == "it has no bf16"
    assert done.ways[1].is_result


def test_what_is_finished_is_found_again_and_stands_for_its_versions(
    measured: ModelRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path / "results.json")
    other = replace(measured, case=replace(CASE, threads=2))
    plan = plan_of(tmp_path, a_way("eager"), a_way("compile"), a_way("enable", is_ours=True))

    results.add(measured)
    results.add(other)
    newer = with_times(measured, enable=50)
    results.add(newer)

    assert {one.case for one in results.runs()} == {CASE, other.case}
    assert standing(results.runs(), CASE, plan) == newer
    assert standing(results.runs(), replace(CASE, batch=2), plan) is None
    assert standing(results.runs(), CASE, replace(plan, rounds=4)) is None
    assert standing(results.runs(), CASE, replace(plan, ways=plan.ways[1:])) is None
    for updated in ({"wheel": "rich"}, {"settings": {"streams": "2"}}):
        ways = (replace(plan.ways[0], **updated), *plan.ways[1:])
        assert standing(results.runs(), CASE, replace(plan, ways=ways)) is None
    monkeypatch.setattr("gemm_tuner.models.results.built_with", lambda _dtype: "transformers 0.1")
    assert standing(results.runs(), CASE, plan) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 2, "runs": []}'])
def test_a_file_that_is_none_of_results_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)

    with pytest.raises(InvalidSetting, match=r"results\.json cannot be read: it"):
        Results(path).check()
    assert path.read_text() == text


@pytest.mark.parametrize(
    "damage",
    [
        {"samples_ns": [], "disturbed": []},
        {"samples_ns": [0, 100, 100]},
        {"samples_ns": [10**400, 100, 100]},
        {"disturbed": [False]},
        {"samples_ns": [100] * 4, "disturbed": [False] * 4},
    ],
)
def test_a_file_whose_samples_do_not_fit_is_refused(
    damage: dict[str, object], measured: ModelRun, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    Results(path).add(measured)
    contents = json.loads(path.read_text())
    contents["runs"][0]["ways"][2].update(damage)
    path.write_text(json.dumps(contents))

    with pytest.raises(InvalidSetting, match="enable has no time for each of 3 rounds"):
        Results(path).runs()


WRITER = """
import sys
from pathlib import Path
from gemm_tuner.models.results import Results
results = Results(Path(sys.argv[1]))
[run] = results.runs()
print("begun", flush=True)
while True:
    results.add(run)
"""


def test_the_file_is_whole_whenever_the_writer_is_killed(
    measured: ModelRun, tmp_path: Path
) -> None:
    results = Results(tmp_path / "results.json")
    results.add(measured)
    program = [sys.executable, "-c", WRITER, str(tmp_path / "results.json")]

    with subprocess.Popen(program, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        inode = (tmp_path / "results.json").stat().st_ino
        while (tmp_path / "results.json").stat().st_ino == inode:
            assert results.runs() == (measured,)
        os.kill(writer.pid, signal.SIGKILL)

    assert results.runs() == (measured,)
    results.add(measured)  # the lock of who was killed holds nobody up


def test_the_roof_is_the_longer_of_arithmetic_and_reading_for_each_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [
        LayerCalls(m=256, n=512, k=512, has_bias=True, calls=2),  # 128 FLOP and more for a byte
        LayerCalls(m=1, n=512, k=512, has_bias=False, calls=3),  # half a FLOP for a byte
    ]
    roof = Roof(detect_cpu(), PRECISIONS["f32"], layers)

    for _round in range(3):
        roof.sample()
    assert roof.flop_per_s > 1e6
    assert roof.bytes_per_s > 1e6

    monkeypatch.setattr(Roof, "flop_per_s", 1e11)  # a busy machine may read much slower than this
    monkeypatch.setattr(Roof, "bytes_per_s", 1e10)
    arithmetic_s = 2 * (2 * 256 * 512 * 512) / 1e11
    reading_s = 3 * 4 * (512 + 512 * 512 + 512) / 1e10
    assert roof.layers_s(1) == pytest.approx(arithmetic_s + reading_s)
    assert roof.layers_s(2) == pytest.approx((arithmetic_s + reading_s) / 2)


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_each_precision_has_a_roof(precision: Precision) -> None:
    layers = [LayerCalls(m=1, n=512, k=512, has_bias=False, calls=1)]
    roof = Roof(detect_cpu(), precision, layers)

    roof.sample()

    assert 0 < roof.layers_s(1) < 0.1


def test_the_share_of_the_limit_is_that_over_our_time(
    measured: ModelRun,
) -> None:
    limit = ModelLimit(
        way="compile", outside_s=3e-8, layers_s=6e-8, peak_flop_per_s=1e11, read_bytes_per_s=1e10
    )

    assert replace(measured, limit=limit).share_of_limit == pytest.approx(0.9)  # of 100 ns


def test_the_limit_is_of_the_least_time_outside_that_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = (a_way("listed"), a_way("compile"), a_way("enable", is_ours=True))
    monkeypatch.setattr(Roof, "layers_s", lambda _roof, _threads: 120e-9)

    done = measure_case(CASE, plan_of(tmp_path, *ways))

    assert done.limit is not None
    assert done.limit.way == "compile"
    assert done.limit.outside_s == pytest.approx(0.3 * 200e-9)
    assert done.limit.layers_s == 120e-9


def test_what_another_way_takes_less_than_is_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Roof, "layers_s", lambda _roof, _threads: 141e-9)  # and 60 of 200 outside

    none = measure_case(CASE, plan_of(tmp_path, a_way("listed"), a_way("compile")))

    assert none.limit is None
    assert "shows so little outside of layers" in none.why_no_limit


def test_a_model_without_layers_of_pytorch_has_no_limit(measured: ModelRun) -> None:
    assert measured.limit is None
    assert measured.why_no_limit == "no way of PyTorch tells the layers of the model"
    assert measured.share_of_limit is None
    assert measured.ways[0].shares == TimeShares(taken=0.5, left=0.2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no-such"], "model 'no-such' is not known; use some of: bert-base"),
        (
            ["--dtype", "f64"],
            f"dtype 'f64' is not known; use some of: {', '.join(PRECISIONS)}.",
        ),
        (["--ways", "tvm"], "way 'tvm' is not known; use some of: eager"),
        (["--threads", "1,x"], "threads '1,x' are not understood"),
        (["--threads", "4096"], "4096"),
        (["--threads", "9" * 5000], f"threads '{'9' * 40}' are not understood"),
        (["--deadline", "999999999999h"], "duration '999999999999h' is longer than a year"),
        (["--out", "."], "file . cannot be written: it is a folder"),
        (["--budget", "soon"], "duration 'soon' is not understood"),
        (["--out", "/no/such/folder/results.json"], "cannot be written"),
    ],
)
def test_an_argument_that_cannot_be_used_is_one_line(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    assert run(["bench-models", *arguments]) > 0

    [line] = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.parametrize(
    ("missing", "for_what", "install"),
    [
        ("torch", "bench-models", "torch,models"),
        ("transformers", "bench-models", "torch,models"),
        ("torchao", "--dtype int8", "torch,torchao"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(
    missing: str,
    for_what: str,
    install: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def without(name: str) -> object:
        return None if name == missing else find_spec("json")

    monkeypatch.setattr(command, "find_spec", without)
    monkeypatch.chdir(tmp_path)

    assert run(["bench-models", "dlrm", "--dtype", "f32,int8"]) == 3

    [line] = capsys.readouterr().err.splitlines()
    assert f"{for_what} needs {missing}, which is not installed" in line
    assert f'pip install "gemm-tuner[{install}]"' in line


def _fake(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    asked: list[str],
    change: Callable[[WayRun], WayRun] = lambda one: one,
) -> list[str]:
    """Let the command take ways from a script; return what a case of it would be asked for."""
    plan = plan_of(folder)

    def measure(case: ModelCase, given: Plan, on_step: OnStep) -> ModelRun:
        if case.model == "mixer" and "stop" in asked:
            raise KeyboardInterrupt
        asked.append(case.model)
        done = measure_case(case, replace(given, command=plan.command), on_step)
        return replace(done, ways=tuple(map(change, done.ways)))

    monkeypatch.setattr(command, "measure_case", measure)
    monkeypatch.setattr(command, "find_spec", lambda _name: find_spec("json"))
    monkeypatch.setattr("gemm_tuner.models.measure.version", lambda wheel: f"1.0 of {wheel}")
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))
    arguments = ["--ways", "eager,enable", "--rounds", "2", "--budget", "0", "--json"]
    return ["bench-models", "dlrm", "mixer", *arguments, "--out", str(folder / "results.json")]


def test_what_was_stopped_goes_on_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["stop"]
    arguments = _fake(monkeypatch, tmp_path, asked)

    assert run(arguments) == 1
    stopped = capsys.readouterr()
    assert [one["model"] for one in json.loads(stopped.out)["models"]] == ["dlrm"]
    assert "Stopped; what was finished is kept, and the same command goes on." in stopped.err

    asked.clear()
    assert run(arguments) == 0
    assert asked == ["mixer"]
    facts = json.loads(capsys.readouterr().out)
    assert {one["model"]: one["ratio"]["median"] for one in facts["models"]} == {
        "dlrm": 4.0,
        "mixer": 4.0,
    }
    assert facts["means"][0]["geometric_mean"] == pytest.approx(4.0)

    asked[:] = ["stop"]
    assert run([*arguments, "--again"]) == 1
    assert "the same command without --again goes on" in capsys.readouterr().err
    asked.clear()
    assert run([*arguments, "--again"]) == 0
    assert asked == ["dlrm", "mixer"]


@pytest.mark.parametrize(
    ("ways", "may_pass"),
    [(["enable"], True), (["enable"], False), (["eager", "enable"], False)],
    ids=["memory", "conversion", "no result"],
)
def test_what_failed_is_measured_again_if_that_may_have_passed(
    ways: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    may_pass: bool,
) -> None:
    failing, has_result = set(ways), len(ways) == 1

    def fail(one: WayRun) -> WayRun:
        if one.way not in failing:
            return one
        return replace(one, samples_ns=(), disturbed=(), reason="no luck", may_pass=may_pass)

    asked: list[str] = []
    arguments = _fake(monkeypatch, tmp_path, asked, fail)
    assert run(arguments) == (0 if has_result else 1)
    told = capsys.readouterr()
    assert "dlrm f32, 1 thread, batch 1: enable: no luck" in told.err
    assert json.loads(told.out)["models"][0]["ways"][1]["reason"] == "no luck"
    failing.clear()
    asked.clear()

    assert run(arguments) == 0

    is_again = may_pass or not has_result
    assert asked == (["dlrm", "mixer"] if is_again else [])
    told = capsys.readouterr()
    assert ("2 cases are measured again" in told.err) is is_again
    reason = json.loads(told.out)["models"][0]["ways"][1]["reason"]
    assert reason == (None if is_again else "no luck")


def test_what_another_command_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    arguments = _fake(monkeypatch, tmp_path, asked)
    waited: list[None] = []

    @contextmanager
    def measuring() -> Iterator[None]:
        if not waited:  # for the other command
            waited.append(None)
            assert run(arguments) == 0
        yield

    monkeypatch.setattr(command, "measuring", measuring)

    assert run(arguments) == 0
    assert asked == ["dlrm", "mixer"]
    assert "2 cases of 2 measured before" in capsys.readouterr().err

    waited.clear()
    assert run(arguments) == 0
    assert not waited, "what is finished is shown without waiting"


def test_what_cannot_be_kept_is_told(
    measured: ModelRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = _fake(monkeypatch, tmp_path, [])

    def measure(*_asked: object) -> ModelRun:
        (tmp_path / "results.json").write_text("damaged meanwhile")
        return measured

    monkeypatch.setattr(command, "measure_case", measure)

    assert run(arguments) == 2
    told = capsys.readouterr().err
    assert "enable is 2.000 times as fast as compile." in told
    assert "results.json cannot be read" in told


def test_each_row_has_a_name_of_its_own() -> None:
    assert len(MODELS) == 12
    assert list(WAYS) == [
        *("eager", "enable", "replace", "enable-cpp-wrapper", "zentorch", "openvino"),
        *("compile", "cpp-wrapper", "max-autotune", "onnxruntime"),
    ]
