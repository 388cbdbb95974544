from dataclasses import replace
from pathlib import Path

import pytest
from samples import CPU, make_trial

from gemm_tuner.cli.main import run
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.select.model_quality import model_quality
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

PROBLEM = Problem.parse("f32 64x64x64 nk none")
ORDER = shortlist(Space(problem=PROBLEM, cpu=CPU))


def add(
    repository: Repository, candidate: Candidate, call_ns: int, stage: Stage = Stage.RACE
) -> Trial:
    trial = replace(make_trial(call_ns=call_ns, stage=stage), problem=PROBLEM, candidate=candidate)
    repository.add_trial(trial)
    return trial


def test_the_model_is_held_against_the_best_of_the_final(repository: Repository) -> None:
    add(repository, ORDER[0], 800)
    add(repository, ORDER[3], 640, Stage.FINAL)
    add(repository, ORDER[5], 100)  # a race is too short to trust its best

    (one,) = model_quality(repository, CPU).problems

    assert one.best == ORDER[3]
    assert one.first == ORDER[0]
    assert one.rank == 4
    assert one.regret == pytest.approx(0.2)
    assert one.is_in_top


def test_what_is_as_fast_as_the_best_counts_as_the_best(repository: Repository) -> None:
    add(repository, ORDER[0], 990)
    add(repository, ORDER[1], 812)
    add(repository, ORDER[20], 800, Stage.CONFIRM)

    (one,) = model_quality(repository, CPU).problems

    assert one.rank == 2
    assert one.regret == pytest.approx(1 - 800 / 990)


def test_a_best_that_the_model_puts_last_is_not_in_its_top(repository: Repository) -> None:
    add(repository, ORDER[0], 990)
    add(repository, ORDER[-1], 700, Stage.CONFIRM)

    quality = model_quality(repository, CPU)

    assert quality.problems[0].rank == len(ORDER)
    assert quality.share_in_top == 0


def test_a_report_without_measurements_says_what_to_do(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/empty.sqlite3"
    open_database(url).dispose()

    assert run(["model", "report", "--db", url]) == 2
    assert 'run "gemm-tuner sweep" first' in capsys.readouterr().err


def test_a_report_on_a_cpu_that_is_not_here_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = f"sqlite:///{tmp_path}/store.sqlite3"
    add(Repository(open_database(database)), ORDER[0], 800, Stage.CONFIRM)

    code = run(["model", "report", "--cpu", CPU.exact_key, "--db", database])
    unknown = run(["model", "report", "--cpu", "AuthenticAMD-0", "--db", database])

    captured = capsys.readouterr()
    assert (code, unknown) == (0, 2)
    assert f"1 problem on {CPU.brand} ({CPU.exact_key})" in captured.out
    assert "top 10 of all candidates for 100%" in captured.out
    assert "no CPU with the key 'AuthenticAMD-0'" in captured.err
