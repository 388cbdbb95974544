"""What a program that waits for tuning is told."""

import logging
from dataclasses import replace

import pytest

from gemm_tuner.domain.problem import Problem
from gemm_tuner.tuning.progress import Progress, ProgressLog

FIRST, SECOND = Problem.create(1, 2, 3), Problem.create(4, 5, 6)


def _step(stage: str) -> Progress:
    return Progress(stage=stage, done=1, total=2, best_ratio=1.25, remaining_s=8.0)


def test_the_first_step_of_each_problem_is_told_and_then_one_every_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = iter([0.0, 9.0, 10.0, 11.0])
    log = ProgressLog(clock=lambda: next(times))
    with caplog.at_level(logging.INFO, "gemm_tuner"):
        for problem, stage in ((FIRST, "a"), (FIRST, "b"), (FIRST, "c"), (SECOND, "d")):
            log.show(problem, _step(stage))
    assert [record.getMessage() for record in caplog.records] == [
        "tuning f32 1x2x3 nk none: a, best 1.25 x baseline, 8 s left",
        "tuning f32 1x2x3 nk none: c, best 1.25 x baseline, 8 s left",
        "tuning f32 4x5x6 nk none: d, best 1.25 x baseline, 8 s left",
    ]


def test_a_program_without_logging_is_told_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda _self: False)
    ProgressLog().show(FIRST, _step("searching"))
    told = "gemm-tuner: tuning f32 1x2x3 nk none: searching, best 1.25 x baseline, 8 s left\n"
    assert capsys.readouterr().err == told


def test_a_search_that_takes_longer_than_it_should_says_so() -> None:
    late = Progress(stage="hot", done=1, total=2, best_ratio=None, remaining_s=0.0)
    assert late.note() == "finishing"
    assert late.note(later_s=5.0) == "5 s left"
    assert replace(late, done=2).note() == "at its end"
