"""A range of m as one library: swept, served, fetched, bundled, and called for every m."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from calm import let_nothing_disturb
from planted_times import plant_speeds_of
from served import Site
from working import ask_for, job_now, run_job

import gemm_tuner
from gemm_tuner import Client
from gemm_tuner.build.compile import Build
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.main import run
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidSetting, NotEnoughMemory, PreparationStopped, TrialFailed
from gemm_tuner.layers.limited import within
from gemm_tuner.layers.sources import StoredKernels
from gemm_tuner.layers.wanted import WantedLayer
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.resources import templates_dir
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.select.choose import choose
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.trust.attestation import MeasuringKeys
from gemm_tuner.tuning.job import JobRun
from gemm_tuner.tuning.ranges.range_search import Stopped
from gemm_tuner.tuning.ranges.split_range import split_range
from gemm_tuner.tuning.settings import SweepSettings

N, K = 16, 24
PROBLEM = f"f32 1..6x{N}x{K} nk bias+relu"
ASKED = ["1..6", str(N), str(K), "--epilogue", "bias+relu"]
ARGUMENTS = ["sweep", *ASKED, "--budget", "0.2s", "--split-range", "--json"]

pytestmark = pytest.mark.proof


def _speed(build: Build) -> float:
    """Return a speed by which low tiles are best for one row, and others for more; all lose 2 %."""
    problem, candidate = (line.removeprefix("// ") for line in build.source.text.splitlines()[:2])
    m, chosen = Problem.parse(problem).m, Candidate.parse(candidate)
    if m.exact is None:
        return 2.156
    return 2.2 if (chosen.micro_kernel.mr == 1) is (m.exact == 1) else 2.0


@pytest.fixture(scope="module")
def swept_once(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of a database in which a range of m was split."""
    url = f"sqlite:///{tmp_path_factory.mktemp('split')}/store.sqlite3"
    with pytest.MonkeyPatch.context() as patches:
        let_nothing_disturb(patches)
        plant_speeds_of(patches, _speed)
        assert run([*ARGUMENTS, "--db", url]) == 0
    return url


@pytest.fixture
def swept(swept_once: str, data_directory: Path) -> str:
    """Return the URL of that database, whose measurements are believed in this test."""
    measured_with = MeasuringKeys(data_directory / "gemm-tuner").own()
    assert measured_with is not None
    MeasuringKeys().accept(measured_with)
    return swept_once


def _assert_computes_every_m(kernel: object) -> None:
    assert isinstance(kernel, Kernel)
    random = np.random.default_rng(5)
    x, w = random.standard_normal((6, K), np.float32), random.standard_normal((N, K), np.float32)
    bias = random.standard_normal(N, np.float32)
    packed = kernel.pack(w)
    for rows in range(1, 7):
        y = kernel(x[:rows], packed, bias=bias)
        np.testing.assert_allclose(y, np.maximum(x[:rows] @ w.T + bias, 0), rtol=1e-4, atol=1e-4)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(list(arguments)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_says_where_kernels_take_turns_and_what_each_m_loses_and_is_not_repeated(
    swept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = len(Repository(open_database(swept)).trials())

    (found,) = _json(capsys, *ARGUMENTS, "--db", swept)["ranges"]

    assert len(Repository(open_database(swept)).trials()) == before
    assert [one["m"] for one in found["kernels"]] == ["1", "2..6"]
    assert found["candidate"] == Candidate.parse(found["candidate"]).text
    assert found["artifact"]["sha256"] == found["library"]
    assert [one["m"] for one in found["curve"]] == [1, 2, 3, 6]
    assert [one["loss"] for one in found["curve"]] == pytest.approx([0.02] * 4, abs=1e-3)
    assert found["mean_loss"] == pytest.approx(0.02, abs=1e-3)
    # Dot products pad k to whole vectors, of which those of AVX2 need none here.
    whole_k = 32 if "avx512_f32_dot" in found["candidate"] else K
    assert found["packed_bytes"] == 4 * N * whole_k


def test_what_a_slow_library_loses_is_told_of_the_same_rounds(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_nothing_disturb(monkeypatch)
    plant_speeds_of(
        monkeypatch, lambda build: min(_speed(build), 1.0 if "1..6" in build.source.text else 3.0)
    )

    assert run([*ARGUMENTS, "--db", database]) == 0

    trials = Repository(open_database(database)).trials()
    for rows in (1, 2, 3, 6):
        alone, library = [one for one in trials if one.problem.m.exact == rows][-2:]
        assert library.candidate.below
        assert not alone.candidate.below
        assert alone.measurement is not None
        assert library.measurement is not None
        assert library.measurement.baseline_timing == alone.measurement.baseline_timing


def test_explain_tells_the_kernels_and_the_time_over_m(
    swept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _json(capsys, "explain", *ASKED, "--json", "--db", swept)
    assert [one["m"] for one in found["kernels"]] == ["1", "2..6"]
    assert [one["m"] for one in found["curve"]] == [1, 2, 3, 6]

    assert run(["explain", *ASKED, "--db", swept]) == 0
    text = capsys.readouterr().out
    assert f"Time over m: {PROBLEM}" in text
    assert "loss: 2.0% in the mean over 4 m, 2.0% at worst" in text


def test_it_is_served_and_called_as_one_kernel(swept: str, tmp_path: Path) -> None:
    site = Site.at(swept, tmp_path / "key.pem", Repository(open_database(swept)))

    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        kernel = client.kernel(PROBLEM)
        # An m between those that were tuned alone gets the library too.
        between = client.kernel(PROBLEM.replace("1..6", "4"))

    _assert_computes_every_m(kernel)
    assert isinstance(kernel, Kernel)
    assert isinstance(between, Kernel)
    assert between.artifact == kernel.artifact


def test_it_is_tuned_from_python_and_an_ordinary_sweep_keeps_it(swept: str) -> None:
    split = gemm_tuner.tune(PROBLEM, budget_s=0.2, db_url=swept, split_range=True)
    ordinary = gemm_tuner.tune(PROBLEM, budget_s=0.2, db_url=swept)

    _assert_computes_every_m(split.kernel)
    assert ordinary.verdict.artifact == split.verdict.artifact


def test_a_layer_splits_a_wide_range_unless_that_was_done(
    swept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(name: str, error: Exception | None = None) -> None:
        def noted(_problem: Problem, *, settings: SweepSettings, **_others: object) -> None:
            asked.append(f"{name} {settings.budget_s:.1f}")
            if error:
                raise error

        monkeypatch.setattr(f"gemm_tuner.tuning.ranges.wide_range.{name}", noted)

    def tune(budget_s: float) -> Kernel:
        layer = gemm_tuner.tune_layer(
            N, K, m=["1..6"], epilogue="bias+relu", budget_s=budget_s, db_url=swept, is_quiet=True
        ).layer
        (kernel,) = layer.kernels
        assert isinstance(kernel, Kernel)
        return kernel

    note("split_range")
    note("sweep")
    with monkeypatch.context() as patches:
        patches.setattr("gemm_tuner.tuning.ranges.wide_range._NARROW", 6)
        tune(0.6)
    assert asked == ["sweep 0.4"]  # the range is not wide

    asked.clear()
    assert tune(0.2).candidate.below  # what was split with as much time
    assert asked == []

    tune(0.6)
    note("split_range", Stopped())
    with pytest.raises(PreparationStopped, match="is not split yet"):
        tune(0.6)
    asked.pop()
    note("split_range", TrialFailed("it was not timed"))
    tune(0.6)
    assert asked == ["split_range 0.4", "split_range 0.4", "sweep 0.4"]


def test_a_range_is_left_where_the_time_for_all_layers_is_over(swept: str) -> None:
    limited = within(StoredKernels(swept), 2.0)
    wanted = WantedLayer(n=N, k=K + 1, rows=("1..64",), dtype="f32", epilogue="none", threads=1)

    begin_s = monotonic()
    with pytest.raises(InvalidSetting, match=r"total_budget_s are over: .*is not split yet"):
        limited.tune(wanted, 10.0, is_quiet=True)

    assert monotonic() - begin_s < 60
    with pytest.raises(InvalidSetting, match="were over before it"):
        limited.tune(wanted, 10.0, is_quiet=True)


def test_a_job_with_time_for_it_splits_a_range(swept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_database(swept)
    jobs, repository = Jobs(engine), Repository(engine)
    library = _served(repository)
    before = repository.trials()

    # Each of the 4 m that are tuned first has at most what it had in the sweep.
    monkeypatch.setattr("gemm_tuner.tuning.ranges.range_budget.LEAST_S", 0.1)
    job = ask_for(jobs, Problem.parse(PROBLEM), budget_s=1.6)
    run_job(jobs, repository, job)

    over = job_now(jobs, job)
    assert (over.state, over.detail.partition(" times")[0]) == (JobState.DONE, "tuned: 2.16")
    assert repository.trials() == before
    assert _served(repository) == library


def test_a_job_whose_kernels_were_not_timed_beside_the_library_goes_on_without(
    swept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def found_none(*question: object, **_others: object) -> None:
        asked.append(question)

    monkeypatch.setattr("gemm_tuner.tuning.ranges.split_range.measured_at", found_none)
    monkeypatch.setattr("gemm_tuner.tuning.ranges.range_budget.LEAST_S", 0.1)
    engine = open_database(swept)
    jobs, repository = Jobs(engine), Repository(engine)
    job = ask_for(jobs, Problem.parse(PROBLEM), budget_s=1.6)
    run_job(jobs, repository, job)

    over = job_now(jobs, job)
    assert asked
    assert over.state is JobState.DONE
    assert over.detail.startswith("tuned: ")


def test_a_job_whose_range_cannot_be_split_tunes_it_at_its_greatest_m(
    swept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def fail(_problem: Problem, *, settings: SweepSettings, **_others: object) -> None:
        asked.append(settings.budget_s)
        raise TrialFailed

    monkeypatch.setattr("gemm_tuner.tuning.job.split_range", fail)
    monkeypatch.setattr("gemm_tuner.tuning.ranges.range_budget.LEAST_S", 0.01)
    engine = open_database(swept)
    jobs, repository = Jobs(engine), Repository(engine)
    job = ask_for(jobs, Problem.parse(PROBLEM), budget_s=0.12)
    run_job(jobs, repository, job)

    assert asked == pytest.approx([0.015])
    assert job_now(jobs, job).detail.startswith("tuned: 2.16 times")


def test_a_job_that_is_cancelled_while_it_splits_says_what_is_kept(
    swept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_problem: Problem, **_settings: object) -> None:
        raise Stopped

    monkeypatch.setattr("gemm_tuner.tuning.job.split_range", stop)
    monkeypatch.setattr("gemm_tuner.tuning.ranges.range_budget.LEAST_S", 0.01)
    monkeypatch.setattr(JobRun, "_is_cancelled", property(lambda _run: True))
    engine = open_database(swept)
    jobs = Jobs(engine)
    job = ask_for(jobs, Problem.parse(PROBLEM.replace("1..", "2..")), budget_s=0.12)
    run_job(jobs, Repository(engine), job)

    said = "cancelled before a kernel was timed for the range; what was tried for single m is kept"
    assert job_now(jobs, job).detail == said


def _served(repository: Repository) -> Candidate:
    problem = Problem.parse(PROBLEM)
    match = choose(repository, problem, cpu=detect_cpu(), context=ExecutionContext())
    assert match.verdict.candidate is not None
    assert match.verdict.candidate.below
    return match.verdict.candidate


def test_it_is_called_from_c(
    swept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library, program = tmp_path / "kernel.so", tmp_path / "call_kernel"
    assert run(["source", *ASKED, "--binary", str(library), "--db", swept]) == 0
    capsys.readouterr()
    example = Path(__file__).parents[2] / "examples" / "c" / "call_kernel.c"
    flags = ["-x", "c", "-std=gnu11", "-O2", "-I", str(templates_dir() / "abi")]
    subprocess.run(
        [*find_toolchain().command, *flags, str(example), "-o", str(program), "-ldl", "-lm"],
        check=True,
    )

    called = subprocess.run(
        [program, library, *ASKED[:3]], capture_output=True, text=True, check=False
    )

    assert called.returncode == 0, called.stderr
    assert f'"problem":"{PROBLEM}"' in called.stdout
    assert '"kernels":[{' in called.stdout


def test_a_bundle_has_one_library_for_the_range(
    swept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "layers.csv").write_text(f"name,m,n,k,epilogue\nfc,1..6,{N},{K},bias+relu\n")

    folder = tmp_path / "bundle"
    assert run(["bundle", str(tmp_path / "layers.csv"), str(folder), "--db", swept]) == 0

    capsys.readouterr()
    assert len(list(folder.rglob("*.so"))) == 1


def test_who_stops_it_keeps_what_was_tried_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_nothing_disturb(monkeypatch)
    plant_speeds_of(monkeypatch, _speed)
    repository = Repository(open_database(f"sqlite:///{tmp_path}/store.sqlite3"))

    def split(is_stopped: Callable[[], bool]) -> None:
        split_range(
            Problem.parse(PROBLEM),
            context=ExecutionContext(),
            cpu=detect_cpu(),
            repository=repository,
            settings=SweepSettings(budget_s=0.2, toolchain=find_toolchain(), baseline="scalar"),
            on_progress=lambda _step: None,
            is_stopped=is_stopped,
        )

    def once_there_are_trials() -> bool:
        return len(repository.trials()) > 2

    with pytest.raises(Stopped):
        split(once_there_are_trials)
    kept = repository.trials()
    assert 2 < len(kept) < 40
    split(lambda: False)

    assert set(kept) <= set(repository.trials())


def test_nothing_is_tuned_where_memory_does_not_suffice_for_the_greatest_m(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[int] = []

    def too_large(problem: Problem, **_settings: object) -> None:
        tuned.append(problem.m.high)
        raise NotEnoughMemory

    monkeypatch.setattr("gemm_tuner.tuning.ranges.range_search.sweep", too_large)

    with pytest.raises(NotEnoughMemory):
        gemm_tuner.tune(PROBLEM, db_url=f"sqlite:///{tmp_path}/store.sqlite3", split_range=True)
    assert tuned == [6]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "8", "16", "24", "--split-range"], "m = 8 of 8x16x24 is no range"),
        (["sweep", "0..1", "16", "24", "--split-range"], "is no range"),
        (
            ["sweep", "1..8", "16", "24", "--split-range", "--share-weights"],
            "--share-weights",
        ),
        (["sweep", "1..8", "16", "24", "--split-range", "--dry-run"], "--dry-run and"),
        (["sweep", "1..8", "16", "24", "--split-range", "--strategy", "random"], "--strategy and"),
        (
            ["sweep", "1..8", "16", "24", "--split-range", "--target", "zen3"],
            "leave out --split-range",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--db", f"sqlite:///{tmp_path}/store.sqlite3"]) != 0
    assert said in capsys.readouterr().err
