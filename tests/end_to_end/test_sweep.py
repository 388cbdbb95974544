"""Sweeps through the command line: the table, the whole path, and what survives an interruption."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served import Site

from gemm_tuner import Client
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.cli.main import run
from gemm_tuner.domain.problem import Problem
from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository

PROBLEM = Problem.parse("f32 8x32x16 nk bias+relu")
ARGUMENTS = ["sweep", "8", "32", "16", "--epilogue", "bias+relu", "--budget", "1s"]
SEED = 5


@pytest.fixture
def database(tmp_path: Path) -> str:
    """Return the URL of a database that does not exist yet."""
    return f"sqlite:///{tmp_path}/sweep.sqlite3"


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


def _start_long_sweep(database: str) -> subprocess.Popen[str]:
    """Return a sweep that has recorded trials and has minutes to go."""
    command = [sys.executable, "-m", "gemm_tuner", *ARGUMENTS[:-1], "10m", "--regime", "both"]
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

    kept = len(Repository(open_database(database)).trials())
    assert process.returncode == 1
    assert "run the same command again to resume" in messages
    assert "Traceback" not in messages
    assert kept > 0
    facts = _sweep_facts(database, capsys)
    assert facts["resumed"]
    assert facts["tried"] >= kept


def test_kill_9_loses_no_recorded_trial(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    with _start_long_sweep(database) as process:
        kept = len(Repository(open_database(database)).trials())
        os.kill(process.pid, signal.SIGKILL)

    after = len(Repository(open_database(database)).trials())
    assert process.returncode == -signal.SIGKILL
    assert after >= kept > 0
    facts = _sweep_facts(database, capsys)
    assert facts["resumed"]
