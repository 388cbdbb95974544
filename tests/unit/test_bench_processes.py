"""Timing builds in several processes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from samples import make_disturbed_trial, make_trial

from gemm_tuner.bench.finding import Finding, TimedFinding
from gemm_tuner.bench.processes import time_in_processes
from gemm_tuner.domain.record import Outcome, Trial


def _found(trial: Trial) -> TimedFinding:
    assert trial.measurement is not None
    return TimedFinding(
        finding=Finding(outcome=Outcome.CORRECT),
        measurements=(trial.measurement,),
        conditions=trial.conditions,
    )


FAST = _found(make_trial(call_ns=500))
MIDDLE = replace(_found(make_trial(call_ns=800)), conditions=None)
SLOW = _found(make_trial(call_ns=1100))
DISTURBED = _found(make_disturbed_trial())
FAILED = TimedFinding(finding=Finding(outcome=Outcome.CRASHED, detail="SIGILL"))


def _time(*found: TimedFinding, processes: int) -> tuple[TimedFinding, list[int]]:
    """Return the result, and the processes that were asked for."""
    asked: list[int] = []

    def time_in(process: int, builds: Sequence[str]) -> tuple[TimedFinding, ...]:
        assert list(builds) == ["a"]
        asked.append(process)
        return (found[process],)

    (timed,) = time_in_processes("a", time_in, processes)
    return timed, asked


def test_the_measurement_is_of_all_processes_with_the_conditions_of_its_own() -> None:
    timed, asked = _time(SLOW, FAST, MIDDLE, processes=3)

    assert asked == [0, 1, 2]
    assert timed.conditions is None
    assert timed.measurement is not None
    medians_ns = [one.candidate.median_ns for one in timed.measurement.processes]
    assert medians_ns == [800.0, 1100.0, 500.0]


def test_processes_that_find_the_same_all_count() -> None:
    timed, _asked = _time(FAST, FAST, FAST, processes=3)

    assert timed.measurement is not None
    assert len(timed.measurement.processes) == 3


def test_a_disturbed_process_is_replaced() -> None:
    timed, asked = _time(FAST, DISTURBED, SLOW, processes=2)

    assert asked == [0, 1, 2]
    assert timed.measurement is not None
    assert all(one.interference is None for one in timed.measurement.processes)


def test_processes_that_stay_disturbed_are_told() -> None:
    timed, asked = _time(FAST, DISTURBED, DISTURBED, DISTURBED, processes=2)

    assert asked == [0, 1, 2, 3]
    assert timed.measurement is not None
    assert any(one.interference is not None for one in timed.measurement.processes)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_build_that_fails_in_a_process_has_failed(processes: int) -> None:
    timed, _asked = _time(*(FAST, FAILED)[2 - processes :], processes=processes)

    assert timed == FAILED


def test_what_is_timed_together_has_the_rounds_of_one_process() -> None:
    """By their own ratios, the first would be of the third process and the second of the first.

    Other work that disturbs one of them asks for another process of both.
    """
    of_process = [(SLOW, MIDDLE), (FAST, DISTURBED), (MIDDLE, SLOW), (FAST, FAST)]

    timed = time_in_processes("ab", lambda process, _builds: of_process[process], 3)

    calls_ns = [
        [rounds.candidate.median_ns for rounds in one.measurement.processes]
        for one in timed
        if one.measurement
    ]
    assert calls_ns == [[800.0, 1100.0, 500.0], [1100.0, 800.0, 500.0]]


def test_what_fails_in_a_process_is_out_and_the_others_are_timed_anew_in_all() -> None:
    """`b` fails in the second process, and `c` in the first without `b`."""
    told = {"a": (FAST, FAST), "b": (FAST, FAILED), "c": (FAST, FAST)}
    asked: list[str] = []

    def time_in(process: int, builds: Sequence[str]) -> tuple[TimedFinding, ...]:
        asked.append("".join(builds))
        is_without_b = "b" not in builds
        return tuple(
            FAILED if one == "c" and is_without_b else told[one][process] for one in builds
        )

    first, second, third = time_in_processes("abc", time_in, 2)

    assert asked == ["abc", "abc", "ac", "a", "a"]
    assert (second, third) == (FAILED, FAILED)
    assert first.measurement is not None
    assert len(first.measurement.processes) == 2
