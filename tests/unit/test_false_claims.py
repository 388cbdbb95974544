"""The search for false claims: what it draws, keeps and reports."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import false_claims
import pytest
from false_claims import Check, Claim, Jobs, draw, report
from random_problems import draw_problem

from gemm_tuner.machine.detect import detect_cpu

SETTINGS = {"seed": 1.0, "budget_s": 2.0}
ANSWER_IS_NO = 1
MISSING = 3


def make_claim(index: int, decision: str = "tuned", doubt: str | None = None) -> Claim:
    return Claim(
        index=index,
        problem="f32 1x2x3 nk none",
        threads=1,
        decision=decision,
        doubt=doubt,
        baseline="onednn 3.2.0",
        ratio=1.5,
    )


def make_jobs(path: Path, *claims: Claim) -> Jobs:
    jobs = Jobs(path / "jobs.jsonl", SETTINGS)
    for claim in claims:
        jobs.add_claim(claim)
    return jobs


def test_the_same_seed_draws_the_same_problems_of_many_kinds() -> None:
    cpu = detect_cpu()
    drawn = [draw(1, index, cpu) for index in range(60)]

    assert drawn == [draw(1, index, cpu) for index in range(60)]
    assert drawn != [draw(2, index, cpu) for index in range(60)]
    assert len({problem.types for problem, _threads in drawn}) > 5
    assert all(problem.flop(problem.m.high) <= 2e8 for problem, _threads in drawn)
    assert draw_problem(Random(3), cpu) == draw_problem(Random(3), cpu)


def test_what_was_done_is_not_done_again(tmp_path: Path) -> None:
    jobs = make_jobs(tmp_path, make_claim(0), make_claim(1, "tie"), make_claim(2))
    jobs.add_check(Check(index=0, ratio=1.4, low=1.3, high=1.5))
    jobs.add_check(Check(index=2, ratio=1.1, doubt="disturbed: by all"))

    again = make_jobs(tmp_path)

    assert sorted(again.claims) == [0, 1, 2]
    assert [claim.index for claim in again.unchecked] == [2]


def test_a_file_of_other_settings_is_refused(tmp_path: Path) -> None:
    make_jobs(tmp_path)

    with pytest.raises(SystemExit, match="other settings"):
        Jobs(tmp_path / "jobs.jsonl", {"seed": 2.0, "budget_s": 2.0})


@pytest.mark.parametrize(
    ("check", "code", "told"),
    [
        (Check(index=0, ratio=1.4), 0, "0 refuted, 0 implausible, 0 not checked"),
        (Check(index=0, ratio=0.98), ANSWER_IS_NO, "1 refuted, 0 implausible, 0 not checked"),
        (
            Check(index=0, ratio=2921.0, doubt="implausible: ref"),
            ANSWER_IS_NO,
            "0 refuted, 1 implausible, 0 not checked",
        ),
        (
            Check(index=0, ratio=0.5, doubt="disturbed: by all"),
            MISSING,
            "0 refuted, 0 implausible, 1 not checked",
        ),
    ],
)
def test_the_exit_code_says_whether_a_claim_is_false(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], check: Check, code: int, told: str
) -> None:
    doubted = make_claim(1, "tie", doubt="disturbed: by all")
    jobs = make_jobs(tmp_path, make_claim(0), doubted, make_claim(2, "tie", doubt="implausible: x"))
    jobs.add_check(check)

    assert report(jobs) == code

    printed = capsys.readouterr().out
    assert "3 problems: 1 disturbed, 1 refused, 1 tuned" in printed
    assert f"1 tuned: {told}" in printed


def test_a_claim_is_checked_beside_its_own_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: Iterator[list[tuple[str, float, str | None]]] = iter(
        [
            [("onednn 3.2.0", 0.5, "disturbed: by all")],
            [("onednn 3.13.1", 0.7, None), ("onednn 3.2.0", 1.4, None)],
        ]
    )
    asked: list[list[str]] = []

    def bench(command: list[str], **_options: object) -> object:
        asked.append(command)
        beside = [
            {"baseline": name, "ratio": {"median": ratio, "low": 1.3, "high": 1.5}, "doubt": doubt}
            for name, ratio, doubt in next(answers)
        ]
        return type("Ended", (), {"stdout": json.dumps({"layers": [{"baselines": beside}]})})

    monkeypatch.setattr(subprocess, "run", bench)
    monkeypatch.setattr(false_claims, "wait_until_calm", lambda _longest_s: True)
    jobs = make_jobs(tmp_path, make_claim(0))

    false_claims.check(jobs, calm_wait_s=0.0)

    assert jobs.checks[0] == Check(index=0, ratio=1.4, low=1.3, high=1.5)
    assert len(asked) == 2
    assert asked[0][asked[0].index("--baseline") + 1] == "onednn"


def test_a_busy_machine_leaves_claims_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(false_claims, "wait_until_calm", lambda _longest_s: False)
    jobs = make_jobs(tmp_path, make_claim(0))

    false_claims.check(jobs, calm_wait_s=0.0)

    assert jobs.unchecked == [make_claim(0)]
