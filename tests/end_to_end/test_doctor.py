"""`gemm-tuner doctor`, run whole on this machine, whatever state that is in."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from samples import make_disturbed_trial, make_trial
from served import Site

from gemm_tuner.cli.main import run
from gemm_tuner.cli.reports.conditions import conditions_facts, conditions_lines, trial_behind
from gemm_tuner.doctor import clock, noise
from gemm_tuner.domain.check import Level
from gemm_tuner.domain.measurement import of_several_processes
from gemm_tuner.machine.measuring_lock import MeasuringLock
from gemm_tuner.select.choose import choose

CHECKS = [
    "instructions", "amx", "cpus", "smt", "quota", "huge pages", "measuring lock", "clock",
    "noise", "load", "steal", "compiler", "baselines", "sandbox", "database", "time", "keys",
    "space",
]  # fmt: skip
GEMM_TUNER = [sys.executable, "-m", "gemm_tuner"]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Watch for a moment, and keep nothing of it."""
    monkeypatch.setattr(clock, "WATCH_S", 0.05)
    monkeypatch.setattr(noise, "WATCH_S", 0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_all_checks_are_told_and_the_code_follows_from_them(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["doctor", "--json", "--db", site.settings.database_url])

    told = json.loads(capsys.readouterr().out)
    checks = {check["check"]: check for check in told["checks"]}
    levels = [check["level"] for check in told["checks"]]
    assert list(checks) == CHECKS
    assert code == (1 if levels.count(Level.PROBLEM) else 0)
    assert told["problems"] == levels.count(Level.PROBLEM)
    assert told["notes"] == levels.count(Level.NOTE)
    assert checks["database"]["level"] == Level.OK
    assert checks["database"]["figures"]["trials"] == 1
    assert checks["noise"]["figures"]["reads_score"] >= 1


def test_nothing_of_a_machine_needs_a_compiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("GEMM_TUNER_COMPILER", "gcc")

    code = run(["doctor", "--json", "--db", f"sqlite:///{tmp_path}/none.sqlite3"])

    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert code == 1
    assert list(checks) == CHECKS
    assert checks["compiler"]["level"] == Level.PROBLEM
    assert checks["clock"]["seen"].startswith("not known: it is measured by a compiled loop")
    assert checks["noise"]["figures"]["arithmetic_score"] >= 1
    assert list(tmp_path.glob("none*")) == []


def test_a_damaged_database_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "store.sqlite3"
    file.write_text("no database")

    code = run(["doctor", "--db", f"sqlite:///{file}"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert any(line.split()[:2] == ["database", "problem"] for line in lines)


def test_a_worker_that_measures_is_not_disturbed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    lock = MeasuringLock()
    assert lock.acquire()

    run(["doctor", "--json", "--db", f"sqlite:///{tmp_path}/none.sqlite3"])

    lock.release()
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert list(checks) == CHECKS
    assert f"held by process {os.getpid()} " in checks["measuring lock"]["seen"]
    assert {checks[name]["seen"] for name in ("clock", "noise", "load", "steal")} == {
        "not known: the loops would disturb what is measured now"
    }


def test_a_mistyped_database_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--db", "nothing"]) == 2
    assert "is not understood" in capsys.readouterr().err


def test_what_was_found_before_an_interruption_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(noise, "watch", interrupt)

    code = run(["doctor", "--json", "--db", f"sqlite:///{tmp_path}/none.sqlite3"])

    told = json.loads(capsys.readouterr().out)
    assert code == 130
    assert not told["is_complete"]
    assert [check["check"] for check in told["checks"]] == CHECKS[: CHECKS.index("noise")]


@pytest.mark.proof
@pytest.mark.parametrize("shell", ["| head -1", "| true", ">&-", "2>&-", ">/dev/full"])
def test_a_reader_that_leaves_sees_no_traceback(shell: str, tmp_path: Path) -> None:
    doctor = [*GEMM_TUNER, "doctor", "--db", f"sqlite:///{tmp_path}/none.sqlite3"]
    lock = MeasuringLock()
    if shell != "2>&-":  # which shows what is said while it measures, for two seconds
        assert lock.acquire()
    command = ["bash", "-c", f'"$@" {shell}', "bash", *doctor]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40"}

    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lock.release()

    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_explain_tells_the_conditions_of_a_measurement() -> None:
    calm, disturbed = make_trial(), make_disturbed_trial()

    assert conditions_lines(calm)[0].startswith("noise: 1.0%")
    assert conditions_lines(disturbed)[1] == (
        "other work: 90% of the rounds disturbed, 1.5 cores busy with other processes, "
        "0.0% of the time stolen."
    )
    facts = conditions_facts(calm)
    assert facts is not None
    assert (facts["noise"], facts["others"]) == (0.01, None)
    assert conditions_lines(None) == ()
    assert conditions_facts(None) is None


def test_of_several_processes_the_worst_is_told() -> None:
    calm, disturbed = make_trial(), make_disturbed_trial()
    assert calm.measurement is not None
    assert disturbed.measurement is not None
    _middle, (both,) = of_several_processes([[calm.measurement], [disturbed.measurement]])

    lines = conditions_lines(replace(calm, measurement=both))

    assert lines[1].startswith("other work, at most, in 2 processes: 90% of the rounds disturbed")


def test_the_trial_behind_a_verdict_is_found(site: Site) -> None:
    (trial,) = site.repository.trials()
    verdict = choose(site.repository, trial.problem, cpu=trial.cpu, context=trial.context).verdict

    assert trial_behind(verdict, [make_trial(), trial]) == trial
    assert trial_behind(verdict, [make_trial()]) is None
    assert trial_behind(replace(verdict, tried_at=None), [trial]) is None
