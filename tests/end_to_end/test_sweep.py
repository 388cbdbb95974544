"""Sweeps through the command line: the table, the whole path, and what survives an interruption."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import repeat
from math import inf
from pathlib import Path
from typing import Any

import pytest
from planted_times import plant_speeds
from served import Site

from gemm_tuner import Client
from gemm_tuner.bench.finding import TimedFinding
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.requests import Baselines
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.build.compile import _TOOLCHAIN_FLAGS, Build
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.main import WRONG_USAGE, run
from gemm_tuner.cli.progress_line import ProgressLine
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.measurement import Interference, Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.verdict import Decision
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning import earlier, finished, patience, sampling
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.result import SweepResult
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep

DISTURBED = Interference(disturbed_rounds=0.9, stolen=0.0, others=1.5)
PROBLEM = Problem.parse("f32 8x32x16 nk bias+relu")
ARGUMENTS = ["sweep", "8", "32", "16", "--epilogue", "bias+relu", "--budget", "1s"]
LONG = "10m"  # a budget that no test spends
SEED = 5

# Runs the command line until a method of the trial host is called for the fourth time; then the
# process kills itself.
KILLED_IN_FOURTH = """
import os
import signal
import sys

from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.bench.requests import Baselines
from gemm_tuner.cli.main import run
from gemm_tuner.tuning import host

host.usable_cpus = lambda: 1  # of proofs that run together, nobody knows which has ended
method = sys.argv[1]
do = getattr(TrialHost, method)
done = []


def do_or_die(host, *arguments, **settings):
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(arguments)
    return do(host, *arguments, **settings)


setattr(TrialHost, method, do_or_die)
run(sys.argv[2:])
"""


@pytest.fixture
def database(store_url: str) -> str:
    """Return the URL of a database without records."""
    return store_url


def _sweep_facts(database: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = run([*ARGUMENTS, "--db", database, "--json"])
    assert code == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    facts: dict[str, Any] = layer
    return facts


def test_a_swept_layer_is_served_and_called(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = _sweep_facts(database, capsys)

    site = Site.at(database, tmp_path / "key.pem", Repository(open_database(database)))
    with site.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert facts["problem"] == PROBLEM.text
    assert facts["tried"] >= len(facts["finalists"]) - 1 > 0
    assert [row["role"] for row in facts["finalists"]].count("baseline") == 1
    assert max(row["share_of_best"] for row in facts["finalists"]) == 1.0
    inputs = make_inputs(PROBLEM, InputKind.NORMAL, SEED)
    packed = kernel.pack(inputs.w)
    y: Any = kernel(inputs.x, packed, bias=inputs.operands["bias"])
    assert find_error(compute_expected(PROBLEM, inputs), y) is None


def test_a_finished_sweep_is_not_run_again(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _sweep_facts(database, capsys)

    second = _sweep_facts(database, capsys)

    assert second["resumed"]
    assert second["candidate"] == first["candidate"]
    assert second["ratio"] == first["ratio"]


def test_what_was_tuned_before_says_so_and_what_goes_on(
    database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    assert _sweep_facts(database, capsys)["recalled"] is None
    (*_others, last) = Repository(open_database(database)).trials()

    recalled = _sweep_facts(database, capsys)["recalled"]
    run([*ARGUMENTS, "--db", database])

    told = capsys.readouterr().out
    assert recalled["date"] == last.created_at.date().isoformat()
    assert f"tuned before, on {recalled['date']}, " in told
    assert "so nothing was measured; --again measures anew" in told


def test_again_measures_anew_and_the_newer_confirmation_counts(
    database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant_speeds(monkeypatch, repeat(3.0))
    first = _sweep_facts(database, capsys)
    before = Repository(open_database(database)).trials()

    plant_speeds(monkeypatch, repeat(0.5))
    code = run([*ARGUMENTS, "--again", "--db", database, "--json"])
    (second,) = json.loads(capsys.readouterr().out)["layers"]
    third = _sweep_facts(database, capsys)

    after = Repository(open_database(database)).trials()
    assert code == 0
    assert first["decision"] == "tuned"
    assert second["decision"] == third["decision"] == "baseline"
    assert second["artifact"] is None
    assert not second["resumed"]
    assert after[: len(before)] == before
    assert len(after) > len(before)


def test_what_is_not_settled_is_measured_again(
    database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant_speeds(monkeypatch, repeat(1.0))
    assert _sweep_facts(database, capsys)["decision"] == "tie"
    settled = len(Repository(open_database(database)).trials())
    _sweep_facts(database, capsys)
    assert len(Repository(open_database(database)).trials()) == settled

    monkeypatch.setattr(finished, "_WIDE", -1.0)
    plant_speeds(monkeypatch, repeat(1.5))

    assert _sweep_facts(database, capsys)["decision"] == "tuned"
    assert len(Repository(open_database(database)).trials()) > settled


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE artifacts SET compressed_binary = substr(compressed_binary, 1, 100)",
        "UPDATE artifacts SET compressed_binary = X'00'",
        "UPDATE sources SET compressed_text = X'00'",
        "DELETE FROM artifacts",
    ],
)
def test_a_kernel_that_the_store_lost_is_built_again_from_its_record(
    damage: str, database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    lost = _sweep_facts(database, capsys)["artifact"]["sha256"]
    engine = open_database(database)
    with engine.begin() as connection:
        connection.exec_driver_sql(damage)
    store = Repository(engine)

    code = run([*ARGUMENTS, "--db", database])

    note = f"the kernel {lost[:12]} was damaged or missing in the database; it was built again."
    assert code == 0
    assert note in capsys.readouterr().err
    assert sha256(store.binary(lost) or b"").hexdigest() == lost
    assert PROBLEM.text in (store.source_text(lost) or "")
    assert _sweep_facts(database, capsys)["note"] == ""


def test_the_table_names_finalists_and_baseline(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run([*ARGUMENTS, "--db", database])

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "f32 8x32x16 nk bias+relu, hot, 1 thread"
    assert lines[1].split() == ["candidate", "time", "per", "call", "share", "of", "best", "role"]
    assert sum(line.endswith("baseline") for line in lines) == 1
    assert any(line.startswith(("tuned:", "tie:", "baseline:")) for line in lines)


def test_a_file_of_layers_ends_in_a_summary(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = tmp_path / "layers.csv"
    shapes.write_text("name,m,n,k\nfirst,2,16,8\nsecond,4,8,8\n")

    code = run(["sweep", "--shapes", str(shapes), "--budget", "500ms", "--db", database])

    summary = capsys.readouterr().out.partition("Summary\n")[2].splitlines()
    assert code == 0
    assert [line.split()[0] for line in summary[1:3]] == ["first", "second"]
    assert summary[3].startswith("geometric mean, hot, 1 thread: ")


def test_a_dry_run_runs_nothing(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run([*ARGUMENTS, "--db", database, "--dry-run", "--json"])

    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert code == 0
    assert layer["candidates"] > 0
    assert layer["seconds"] >= 1
    assert Repository(open_database(database)).trials() == ()


@pytest.mark.parametrize("operation", ["matmul", "attention"])
def test_a_dry_run_refuses_cold_weights_as_the_sweep_does(
    operation: str, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--operation", operation, "--epilogue", "none", "--regime", "cold_weights"]
    command = [*ARGUMENTS, "--db", database, *asked]
    errors = []
    for arguments in (command, [*command, "--dry-run"]):
        assert run(arguments) == WRONG_USAGE
        errors.append(capsys.readouterr().err.splitlines()[-1])

    assert errors[0] == errors[1]
    assert "no weights that could be cold" in errors[0]


def _start_long_sweep(database: str) -> subprocess.Popen[str]:
    """Return a sweep that has recorded trials and has minutes to go."""
    command = [sys.executable, "-m", "gemm_tuner", *ARGUMENTS[:-1], LONG, "--regime", "both"]
    process = subprocess.Popen(
        [*command, "--db", database], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "searching" in line:
            break
    return process


def test_ctrl_c_keeps_what_was_found_and_the_next_run_resumes(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _start_long_sweep(database) as process:
        process.send_signal(signal.SIGINT)
        _out, messages = process.communicate(timeout=60)

    kept = {trial.candidate for trial in Repository(open_database(database)).trials()}
    assert process.returncode == 1
    assert "run the same command again to resume" in messages
    assert "Traceback" not in messages
    assert kept
    facts = _sweep_facts(database, capsys)
    assert facts["resumed"]
    assert facts["tried"] >= len(kept)


@pytest.mark.parametrize(
    "method", ["verify", pytest.param("time_together", marks=pytest.mark.proof)]
)
def test_kill_9_loses_at_most_the_trials_in_flight(
    method: str, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [method, *ARGUMENTS[:-1], LONG, "--db", database]
    process = subprocess.run(
        [sys.executable, "-c", KILLED_IN_FOURTH, *arguments],
        capture_output=True,
        check=False,
    )

    trials = Repository(open_database(database)).trials()
    is_timed = method == "time_together"
    kept = [trial for trial in trials if (trial.measurement is not None) == is_timed]
    assert process.returncode == -signal.SIGKILL
    assert {trial.outcome for trial in kept} == {Outcome.CORRECT}
    assert len({(trial.candidate, trial.stage) for trial in kept}) == len(kept)
    assert len(kept) > 3 if is_timed else len(kept) == 3
    facts = _sweep_facts(database, capsys)
    assert facts["resumed"]


def _let_generator_be_older(patched: pytest.MonkeyPatch) -> None:
    for module in ("attempt", "earlier", "finished", "sweep"):
        name = f"gemm_tuner.tuning.{module}.generator_version"
        patched.setattr(name, lambda: "gemm-tuner 0.0.1+older")


def _tune(
    database: str,
    *,
    baseline: str = "auto",
    budget_s: float = 1.0,
    contexts: Sequence[ExecutionContext] = (ExecutionContext(),),
    chosen: Sequence[Candidate] = (),
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> SweepResult:
    results = sweep(
        PROBLEM,
        contexts=contexts,
        cpu=detect_cpu(),
        repository=Repository(open_database(database)),
        settings=SweepSettings(toolchain=find_toolchain(), budget_s=budget_s, baseline=baseline),
        on_progress=on_progress,
        is_stopped=is_stopped,
        chosen=chosen,
    )
    return results[0]


@pytest.mark.proof
@pytest.mark.baseline("onednn")
def test_a_sweep_beside_another_baseline_is_another_sweep(database: str) -> None:
    beside_scalar = _tune(database, baseline="scalar")

    beside_onednn = _tune(database, baseline="onednn").verdict.measurement
    again = _tune(database, baseline="scalar")

    assert beside_onednn is not None
    assert beside_onednn.baseline.startswith("onednn")
    assert again.resumed
    assert again.verdict == beside_scalar.verdict


@pytest.mark.proof
def test_a_call_too_small_for_two_threads_stays_with_the_winner_of_one(database: str) -> None:
    alone = _tune(database, baseline="scalar").verdict.candidate

    shared = _tune_for_two(database)

    assert shared.verdict.candidate is not None
    assert shared.verdict.candidate.parts == 1
    assert alone in {trial.candidate for trial in shared.finalists}


@pytest.mark.proof
def test_the_winner_of_one_thread_is_cut_for_two_whatever_the_time(database: str) -> None:
    space = Space(problem=PROBLEM, cpu=detect_cpu())
    for_two = replace(space, threads=2)
    winner = next(one for one in shortlist(space, 24) if len(for_two.cuts_of(one)) > 1)
    _tune(database, baseline="scalar", chosen=[winner])
    contexts = [ExecutionContext(threads=2)]

    _tune(database, baseline="scalar", budget_s=1e-6, contexts=contexts)

    trials = Repository(open_database(database)).trials()
    timed = [trial for trial in trials if trial.context in contexts and trial.measurement]
    assert {trial.candidate.parts for trial in timed} == {1, 2}


@pytest.mark.proof
@pytest.mark.parametrize("threads", [1, 2])
def test_what_won_with_another_generator_is_tried_whatever_the_time(
    database: str, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    unlikely = shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 60)[-1]
    with monkeypatch.context() as before:
        _let_generator_be_older(before)
        _tune(database, baseline="scalar", chosen=[unlikely])
    # Its sources are not these: nothing that it measured stands.
    present = generator_version()
    monkeypatch.setattr(earlier, "stands", lambda trial, _now: trial.generator == present)

    contexts = [ExecutionContext(threads=threads)]
    _tune(database, baseline="scalar", budget_s=1e-6, contexts=contexts)

    trials = Repository(open_database(database)).trials(generator=generator_version())
    assert unlikely in {trial.candidate for trial in trials if trial.measurement is not None}


@pytest.mark.proof
def test_what_an_earlier_generator_timed_is_only_confirmed_again(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sources are those of today: nothing has to be raced, and the winner is confirmed."""
    chosen = shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 3)
    with monkeypatch.context() as before:
        _let_generator_be_older(before)
        _tune(database, baseline="scalar", budget_s=600.0, chosen=chosen)

    result = _tune(database, baseline="scalar", budget_s=600.0, chosen=chosen)

    trials = Repository(open_database(database)).trials(generator=generator_version())
    assert {trial.stage for trial in trials} == {Stage.FINAL, Stage.CONFIRM}
    assert {trial.candidate for trial in result.finalists} == set(chosen)


@pytest.mark.proof
def test_a_finished_sweep_is_run_again_with_other_flags(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _tune(database, baseline="scalar")

    name = find_toolchain().name
    monkeypatch.setitem(_TOOLCHAIN_FLAGS, name, (*_TOOLCHAIN_FLAGS[name], "-fno-inline"))
    again = _tune(database, baseline="scalar")

    assert not again.resumed
    assert first.verdict.artifact != again.verdict.artifact


def test_nothing_is_proved_that_there_is_no_time_to_race(database: str) -> None:
    _tune(database, baseline="scalar", budget_s=1e-6)

    trials = Repository(open_database(database)).trials()
    proved = {trial.candidate for trial in trials if trial.outcome is Outcome.CORRECT}
    assert proved == {trial.candidate for trial in trials if trial.measurement is not None}


def test_two_finalists_of_one_regime_are_tried_in_the_other_whatever_the_time(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    chosen = shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 3)
    hot = _tune(database, baseline="scalar", budget_s=600.0, chosen=chosen)
    contexts = [ExecutionContext(regime=Regime.COLD_WEIGHTS)]

    cold = _tune(database, baseline="scalar", budget_s=1e-6, contexts=contexts)

    assert len({trial.candidate for trial in hot.finalists}) == 3
    best_two = {trial.candidate for trial in cold.finalists}
    assert len(best_two) == 2
    assert best_two < {trial.candidate for trial in hot.finalists}


@pytest.mark.baseline("onednn")
def test_the_best_beside_another_baseline_are_tried_beside_this_one_whatever_the_time(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Space(problem=PROBLEM, cpu=detect_cpu())
    last = shortlist(shape)[-3:]  # none that a sweep tries first
    plant_speeds(monkeypatch, repeat(2.0))
    before = _tune(database, baseline="scalar", budget_s=600.0, chosen=last)

    beside_onednn = _tune(database, baseline="onednn", budget_s=1e-6)

    assert before.verdict.candidate in last
    assert before.verdict.candidate in {trial.candidate for trial in beside_onednn.finalists}


@pytest.mark.proof
def test_threads_that_only_slow_the_baseline_down_do_not_win(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of two parts take twice as long, and the baseline beside them 50 times."""
    _tune(database, baseline="scalar")

    def slow_down(build: Build, found: TimedFinding) -> TimedFinding:
        kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
        beside = found.measurement
        if beside is None:
            return found
        kernel_ns, baseline_ns = (
            (1_000, 10_000) if kernel.native.preferred_parts == 1 else (2_000, 500_000)
        )
        planted = replace(
            beside,
            candidate=_all(beside.candidate, kernel_ns),
            baseline_timing=_all(beside.baseline_timing, baseline_ns),
        )
        return replace(found, measurements=(planted,))

    _plant(monkeypatch, slow_down)
    verdict = _tune_for_two(database).verdict

    assert verdict.candidate is not None
    assert verdict.candidate.parts == 1


def _plant(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Build, TimedFinding], TimedFinding],
) -> None:
    """Change what each timing finds of a build."""
    time_fairly = TrialHost.time_together

    def time_together(
        host: TrialHost,
        builds: Sequence[Build],
        *,
        context: ExecutionContext,
        pairs: int,
        sample_ns: int,
        checks_large_ratios: bool,
        process: int,
    ) -> tuple[TimedFinding, ...]:
        found = time_fairly(
            host,
            builds,
            context=context,
            pairs=pairs,
            sample_ns=sample_ns,
            checks_large_ratios=checks_large_ratios,
            process=process,
        )
        return tuple(change(build, one) for build, one in zip(builds, found, strict=True))

    monkeypatch.setattr(TrialHost, "time_together", time_together)


def _tune_for_two(database: str) -> SweepResult:
    contexts = [ExecutionContext(threads=2)]
    return _tune(database, baseline="scalar", budget_s=3.0, contexts=contexts)


@pytest.mark.proof
def test_a_short_call_of_two_threads_is_confirmed_in_several_processes(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_SHORT_CALL_S", inf)  # on a busy machine, no call is short

    _tune_for_two(database)

    of_two = [one for one in confirmations(database) if one.context.threads == 2]
    assert of_two
    assert {len(one.measurement.processes) for one in of_two if one.measurement} == {6}


def _all(timing: Timing, call_ns: int) -> Timing:
    """Return the timing as it would be if each call had taken this long."""
    return replace(timing, samples_ns=(call_ns * timing.calls_per_sample,) * len(timing.samples_ns))


def test_a_finished_sweep_is_answered_without_a_trial_host(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _tune(database, baseline="scalar")
    monkeypatch.delattr("gemm_tuner.tuning.host.TrialHost")

    assert _tune(database, baseline="scalar").verdict == first.verdict


@pytest.mark.disturbed
def test_a_disturbed_sweep_decides_nothing_and_is_not_finished(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_LEAST_S", 0.0)
    monkeypatch.setattr(patience, "_SHARE", 0.0)
    plant_speeds(monkeypatch, repeat(600.0), interference=repeat(DISTURBED))

    disturbed = _tune(database).verdict

    assert disturbed.decision is Decision.TIE
    assert disturbed.artifact is None
    assert not disturbed.complete
    assert "in 90% of the rounds threads waited for a core" in (disturbed.doubt or "")
    confirmed = len(confirmations(database))
    plant_speeds(monkeypatch, repeat(2.0))

    calm = _tune(database).verdict

    assert len(confirmations(database)) > confirmed
    assert calm.decision is Decision.TUNED
    assert calm.ratio is not None
    assert calm.ratio.median == pytest.approx(2.0)


@pytest.mark.disturbed
def test_a_sweep_waits_for_idle_cores_and_confirms_again(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_cores = iter([0.1, 1.0])
    monkeypatch.setattr(patience, "idle_cores", lambda: next(idle_cores))
    in_turn = iter([None, DISTURBED, None])  # the race, and two confirmations
    plant_speeds(monkeypatch, iter([2.0, 600.0, 2.0]), interference=in_turn)
    stages: list[str] = []

    verdict = _tune(
        database,
        chosen=shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 1),
        on_progress=lambda step: stages.append(step.stage),
    ).verdict

    assert len(confirmations(database)) == 2
    assert stages.count("hot, disturbed, waiting for idle cores") == 2
    assert verdict.decision is Decision.TUNED
    assert verdict.doubt is None


def confirmations(database: str) -> list[Trial]:
    trials = Repository(open_database(database)).trials(only_decisive=True)
    return [trial for trial in trials if trial.stage is Stage.CONFIRM]


def test_a_verdict_rests_on_a_confirmed_trial(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finalist that is confirmed first shows less speed: the next one is confirmed too."""
    first, second = shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 2)
    plant_speeds(monkeypatch, iter([4.0, 3.0, 4.0, 3.0, 2.8, 3.0]))

    verdict = _tune(database, budget_s=600.0, chosen=[first, second]).verdict

    trials = Repository(open_database(database)).trials(only_decisive=True)
    confirmed = [trial for trial in trials if trial.stage is Stage.CONFIRM]
    assert [trial.candidate for trial in confirmed] == [first, second]
    assert verdict.candidate == second
    assert confirmed[1].measurement is not None
    assert verdict.measurement == Evidence.of(confirmed[1].measurement)


@pytest.mark.parametrize(
    ("speeds", "stages"),
    [
        ([4.0, 3.0, 1.5, 2.5, 4.0, 3.0, 4.0], "race race final final final final confirm"),
        ([4.0, 3.0, 1.5, 2.5, 1.5, 2.5, 2.6], "race race final final final final confirm"),
        ([4.0, 3.0, 4.0, 3.5, 2.0, 4.0], "race race final final confirm confirm"),
    ],
    ids=["final", "final twice", "confirmation"],
)
def test_what_was_disturbed_is_timed_once_more_and_then_that_counts(
    database: str, monkeypatch: pytest.MonkeyPatch, speeds: list[float], stages: str
) -> None:
    chosen = shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 2)
    plant_speeds(monkeypatch, iter(speeds))

    measurement = _tune(database, budget_s=600.0, chosen=chosen).verdict.measurement

    trials = Repository(open_database(database)).trials()
    timed = [trial.stage.value for trial in trials if trial.measurement is not None]
    assert timed == stages.split()
    assert measurement is not None
    assert measurement.ratio.median == pytest.approx(speeds[-1], rel=1e-3)


def test_of_equally_fast_kernels_the_one_with_fewer_loads_wins(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, few = (
        Candidate.parse(f"scalar_f32_{tile} mc8_nc32_kc16 jc_ic_jr_ir") for tile in ("1x8", "4x2")
    )
    plant_speeds(monkeypatch, iter([2.01, 2.0, 2.01, 2.0, 2.0]))

    verdict = _tune(database, budget_s=600.0, chosen=[many, few]).verdict

    assert verdict.candidate == few


def test_the_time_left_is_that_of_all_contexts(database: str) -> None:
    steps: list[Progress] = []

    _tune(
        database,
        budget_s=1000.0,
        contexts=[ExecutionContext(regime=regime) for regime in Regime],
        on_progress=steps.append,
        is_stopped=lambda: bool(steps),
    )

    assert steps[0].remaining_s > 500


def test_the_time_left_is_that_of_all_layers(capsys: pytest.CaptureFixture[str]) -> None:
    step = Progress(stage="hot, searching", done=1, total=2, best_ratio=None, remaining_s=10.0)

    with ProgressLine("first (1 of 3)", later_s=60.0) as progress:
        progress.begin()
        progress.show(step)

    assert capsys.readouterr().err == (
        "first (1 of 3): preparing\nfirst (1 of 3): hot, searching 1 of 2, 1 min 10 s left\n"
    )


@pytest.mark.proof
def test_a_layer_that_cannot_be_swept_does_not_end_the_file(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = tmp_path / "layers.csv"
    shapes.write_text("name,m,n,k\nfirst,2,16,8\nhuge,300000,300000,64\nlast,4,8,8\n")
    arguments = ["sweep", "--shapes", str(shapes), "--budget", "500ms", "--db", database]

    code = run([*arguments, "--json"])

    captured = capsys.readouterr()
    facts = json.loads(captured.out)
    assert code == 1
    assert [layer["name"] for layer in facts["layers"]] == ["first", "last"]
    assert [failure["name"] for failure in facts["failures"]] == ["huge"]
    assert f"Error: huge is not swept: {facts['failures'][0]['error']}" in captured.err
    assert run(arguments) == 1
    assert "not swept" in capsys.readouterr().out


def test_an_unexpected_baseline_is_a_warning(
    database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    baselines = TrialHost.baselines

    def baselines_with_note(host: TrialHost, regime: Regime) -> Baselines:
        return replace(baselines(host, regime), left_out={"onednn": "it is not installed."})

    monkeypatch.setattr(TrialHost, "baselines", baselines_with_note)

    code = run([*ARGUMENTS, "--db", database, "--json"])

    captured = capsys.readouterr()
    (layer,) = json.loads(captured.out)["layers"]
    assert code == 0
    note = "onednn was skipped: it is not installed."
    assert layer["note"] == note
    assert captured.err.count(f"Warning: 8x32x16: {note}\n") == 1
