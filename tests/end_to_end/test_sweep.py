"""Sweeps through the command line: the table, the whole path, and what survives an interruption."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from planted_times import plant_speeds
from served import Site
from tuned import PROBLEM, tune

from gemm_tuner import Client
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.requests import Baselines
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.cli.main import WRONG_USAGE, run
from gemm_tuner.cli.terminal.progress_line import ProgressLine
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.record import Outcome
from gemm_tuner.machine.measuring_lock import MeasuringLock
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning import finished
from gemm_tuner.tuning.progress import Progress

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


def test_ctrl_c_while_another_measures_begins_nothing(database: str) -> None:
    other = MeasuringLock()
    assert other.acquire()
    command = [sys.executable, "-m", "gemm_tuner", *ARGUMENTS, "--db", database]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if f"waiting for process {os.getpid()} of yours" in line:
                break
        process.send_signal(signal.SIGINT)
        out, messages = process.communicate(timeout=60)
    other.release()

    assert process.returncode == 1
    assert "Traceback" not in messages
    assert not out
    assert not Repository(open_database(database)).trials()


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


def test_the_time_left_is_that_of_all_contexts(database: str) -> None:
    steps: list[Progress] = []

    tune(
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
