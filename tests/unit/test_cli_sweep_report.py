"""What the report of a sweep says of layers that are not decided."""

from dataclasses import replace

import pytest
from samples import CONTEXT, CPU, PROBLEM, make_disturbed_trial, make_trial

from gemm_tuner.cli.arguments.layers import Layer
from gemm_tuner.cli.reports.sweep_report import print_result, print_summary, result_facts
from gemm_tuner.tuning.result import SweepResult, make_result

LAYER = Layer(name="up", problem=PROBLEM)
UNKNOWN = make_result(PROBLEM, CPU, CONTEXT, [], complete=False, resumed=False)
TUNED = make_result(PROBLEM, CPU, CONTEXT, [make_trial()], complete=True, resumed=False)


@pytest.mark.parametrize(
    ("result", "state"),
    [
        (TUNED, "tuned"),
        (replace(TUNED, is_interrupted=True), "tuned, interrupted"),
        (replace(UNKNOWN, is_interrupted=True), "interrupted"),
        (UNKNOWN, "baseline"),
    ],
)
def test_an_interrupted_layer_is_not_listed_as_decided(
    result: SweepResult, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary([(LAYER, result)], [])

    row = capsys.readouterr().out.splitlines()[2]
    assert row.endswith(f"   {state}")
    assert result_facts(LAYER, result)["interrupted"] is result.is_interrupted


def test_an_interrupted_sweep_says_so_where_a_decision_would_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_result(replace(UNKNOWN, is_interrupted=True))

    assert capsys.readouterr().out.startswith("interrupted: no kernel is confirmed yet")


def test_a_layer_that_was_not_begun_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary([(LAYER, TUNED)], [], [Layer(name="down", problem=PROBLEM)])

    row = capsys.readouterr().out.splitlines()[3]
    assert row.split()[0] == "down"
    assert row.endswith("   not begun")


def test_a_slow_problem_says_as_what_its_candidates_raced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    raced = replace(TUNED, raced_on="f32 64x32x16 nk none")

    print_result(raced)
    print_result(TUNED)

    told = "candidates raced as f32 64x32x16 nk none, finalists on the whole problem"
    assert capsys.readouterr().out.count(told) == 1
    assert result_facts(LAYER, raced)["raced_on"] == "f32 64x32x16 nk none"
    assert result_facts(LAYER, TUNED)["raced_on"] == ""


def test_a_disturbed_layer_is_listed_as_such_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trials = [make_disturbed_trial()]
    disturbed = make_result(PROBLEM, CPU, CONTEXT, trials, complete=True, resumed=False)

    print_summary([(LAYER, TUNED), (LAYER, disturbed)], [])

    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("   tuned")
    assert lines[3].endswith("   tie, disturbed")
    assert lines[-1].startswith("1 measurement disturbed by other work")
