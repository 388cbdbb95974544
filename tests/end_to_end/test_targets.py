"""From a CPU that is not here to a kernel that is timed: chosen, proved, served, raced."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gemm_tuner.bench.finding import Finding
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.build.compile import Build
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.main import run
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage
from gemm_tuner.domain.verdict import Basis
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.select.choose import choose
from gemm_tuner.space.cores import CORES, core_named
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.shortlist import SHORTLIST, Shortlist, predict

ARGUMENTS = ["17", "40", "70", "--dtype", "bf16", "--epilogue", "bias"]
PROBLEM = Problem.parse("bf16 17x40x70 nk bias")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.sqlite3"


@pytest.mark.skipif(
    IsaFeature.AVX512_BF16 not in detect_cpu().isa,
    reason="AMX kernels are emulated on a CPU with AVX512-BF16",
)
def test_a_kernel_for_amx_is_chosen_proved_and_served_to_a_cpu_that_has_it(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", *ARGUMENTS, "--target", "sapphire_rapids", "--budget", "60s", "--db", url]

    assert run([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    repository = Repository(open_database(url))
    trials = repository.trials(problem=PROBLEM)

    assert facts["target"] == "sapphire_rapids"
    assert facts["layers"][0]["proved"][0]["candidate"].startswith("amx_bf16_")
    assert not facts["layers"][0]["failed"]
    assert {trial.stage for trial in trials} == {Stage.PREDICTED}
    assert {trial.outcome for trial in trials} == {Outcome.CORRECT}
    assert all(trial.measurement is None for trial in trials)

    target = core_named("sapphire_rapids").cpu
    match = choose(repository, PROBLEM, cpu=target, context=ExecutionContext())
    assert match.verdict.basis is Basis.PREDICTED
    assert match.verdict.artifact is not None
    assert IsaFeature.AMX_BF16 in match.verdict.artifact.required_isa
    assert repository.binary(match.verdict.artifact.sha256)

    here = choose(repository, PROBLEM, cpu=detect_cpu(), context=ExecutionContext())
    if IsaFeature.AMX_BF16 not in detect_cpu().isa:
        assert here.verdict.artifact is None

    # A second run proves nothing again.
    assert run(command) == 0
    assert "proving" not in capsys.readouterr().err


@pytest.mark.isa("avx512f", "avx512vl", "avx512bw", "avx512dq", "fma")
def test_for_threads_that_are_not_here_a_kernel_is_predicted_without_a_ratio(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gemm_tuner.machine.cpus.usable_cpus", lambda: 2)
    command = ["sweep", "16", "256", "32", "--target", "zen5", "--threads", "64", "--budget", "1ms"]

    assert run([*command, "--db", url]) == 0

    repository = Repository(open_database(url))
    problem, context = Problem.parse("f32 16x256x32"), ExecutionContext(threads=64)
    trials = repository.trials(problem=problem)
    match = choose(repository, problem, cpu=core_named("zen5").cpu, context=context)
    assert trials
    assert all(trial.measurement is None for trial in trials)
    assert match.verdict.basis is Basis.PREDICTED
    assert match.verdict.artifact is not None
    assert match.verdict.comparison is None
    assert "ratio" not in capsys.readouterr().out


@pytest.mark.proof
def test_a_stopped_target_keeps_what_was_proved_and_resumes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are proved at a time, so one more ends after the first."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    repository = Repository(open_database(url))
    steps: list[Progress] = []
    proved: list[Build] = []
    verify = TrialHost.verify

    def count_and_verify(host: TrialHost, build: Build) -> Finding:
        finding = verify(host, build)
        proved.append(build)
        return finding

    monkeypatch.setattr(TrialHost, "verify", count_and_verify)

    def prove(*, is_stopped: Callable[[], bool]) -> Shortlist:
        return predict(
            PROBLEM,
            context=ExecutionContext(),
            cpu=core_named("zen3").cpu,
            repository=repository,
            settings=SweepSettings(toolchain=find_toolchain(), budget_s=300.0),
            on_progress=steps.append,
            is_stopped=is_stopped,
        )

    stopped = prove(is_stopped=lambda: bool(proved))
    kept = repository.trials(problem=PROBLEM)
    resumed = prove(is_stopped=lambda: False)

    assert 1 <= len(stopped.proven) <= 2
    assert {trial.candidate for trial in kept} == {one.candidate for one in stopped.proven}
    assert len(resumed.proven) == SHORTLIST
    assert len(repository.trials(problem=PROBLEM)) == SHORTLIST
    assert [step.done for step in steps] == list(range(1, SHORTLIST + 1))
    assert all(0 < step.remaining_s <= 300 for step in steps)


@pytest.mark.proof
def test_a_spent_budget_ends_with_the_proofs_in_flight(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    arguments = [*ARGUMENTS, "--target", "zen3", "--budget", "1ms", "--db", url]

    assert run(["sweep", *arguments]) == 0

    assert 1 <= len(Repository(open_database(url)).trials(problem=PROBLEM)) <= 2


@pytest.mark.proof
def test_ctrl_c_keeps_what_was_proved(url: str) -> None:
    # On one core, and of a size whose proofs take their time: some are left after the first.
    alone = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    problem = Problem.parse("bf16 96x512x512 nk bias")
    layer = ["96", "512", "512", "--dtype", "bf16", "--epilogue", "bias"]
    command = [*alone, sys.executable, "-m", "gemm_tuner", "sweep", *layer, "--target", "zen3"]
    with subprocess.Popen(
        [*command, "--db", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _out, messages = process.communicate(timeout=60)

    assert "proving 1 of 8" in first
    assert process.returncode == 1
    assert "what was proved is kept" in messages
    assert "Traceback" not in messages
    trials = Repository(open_database(url)).trials(problem=problem)
    assert {trial.outcome for trial in trials} == {Outcome.CORRECT}


def test_a_shortlist_is_timed_on_the_real_cpu(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune-shortlist", *ARGUMENTS, "--budget", "2s", "--db", url, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    repository = Repository(open_database(url))

    assert facts["layers"][0]["basis"] == "measured"
    assert facts["layers"][0]["ratio"]["median"] > 0
    stages = {trial.stage for trial in repository.trials(problem=PROBLEM)}
    assert stages == {Stage.RACE, Stage.FINAL, Stage.CONFIRM}
    # It is not the end of a sweep: that goes on from here.
    ends = repository.sweep_ends(
        PROBLEM,
        detect_cpu().exact_key,
        ExecutionContext(),
        toolchain=repository.trials(problem=PROBLEM)[0].toolchain,
        generator=repository.trials(problem=PROBLEM)[0].generator,
    )
    assert not ends


def test_what_was_proved_elsewhere_is_proved_here_before_it_is_timed(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the table may have the very key of this CPU: its proofs are not of this CPU."""
    here = detect_cpu()
    row = replace(core_named("zen5"), cpu=here, models=frozenset({here.model}))
    monkeypatch.setitem(CORES, "zen5", row)
    assert run(["sweep", *ARGUMENTS, "--target", "zen5", "--budget", "1s", "--db", url]) == 0
    assert run(["tune-shortlist", *ARGUMENTS, "--budget", "1s", "--db", url]) == 0
    capsys.readouterr()

    trials = Repository(open_database(url)).trials(problem=PROBLEM)
    timed = {trial.candidate for trial in trials if trial.measurement}
    proved = {t.candidate for t in trials if t.stage is Stage.RACE and not t.measurement}
    assert timed
    assert timed <= proved


def test_a_cpu_that_cannot_prove_says_so_and_records_nothing(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weak = replace(detect_cpu(), isa=frozenset({IsaFeature.AVX2, IsaFeature.FMA}))
    monkeypatch.setattr("gemm_tuner.tuning.shortlist.detect_cpu", lambda: weak)

    assert run(["sweep", *ARGUMENTS, "--target", "sapphire_rapids", "--db", url]) == 3

    assert "no kernel for sapphire_rapids can be proved here" in capsys.readouterr().err
    assert not Repository(open_database(url)).trials(problem=PROBLEM)


@pytest.mark.parametrize("option", ["--dry-run", "--share-weights"])
def test_what_a_target_does_not_do_is_refused(
    url: str, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    layers = ["1,17", *ARGUMENTS[1:]]
    assert run(["sweep", *layers, "--target", "zen5", option, "--db", url]) == 2
    assert f"leave out {option}" in capsys.readouterr().err


@pytest.mark.proof
@pytest.mark.isa("avx2", "fma")
def test_regimes_share_what_is_proved(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "2", "16", "8", "--target", "zen3", "--budget", "1ms", "--db", url]
    problem, repository = Problem.parse("f32 2x16x8"), Repository(open_database(url))

    assert run([*command, "--regime", "both"]) == 0
    proved = repository.trials(problem=problem)
    assert run([*command, "--regime", "cold_weights"]) == 0

    assert repository.trials(problem=problem) == proved
    for regime in Regime:
        context = ExecutionContext(regime=regime)
        match = choose(repository, problem, cpu=core_named("zen3").cpu, context=context)
        assert match.verdict.artifact is not None
    capsys.readouterr()

    of_activations = [*command, "--operation", "matmul", "--regime", "cold_weights"]
    assert run(of_activations) == 2
    assert "no weights that could be cold" in capsys.readouterr().err


def test_a_target_that_is_not_known_is_refused(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", *ARGUMENTS, "--target", "z80", "--db", url]) == 2
    assert "target 'z80' is not known; use one of: cascade_lake" in capsys.readouterr().err
