"""When what decides was disturbed and is timed once more."""

import pytest
from samples import make_failed_trial, make_trial

from gemm_tuner.domain.measurement import Measurement, Timing
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.tuning.sampling import (
    confirming_s,
    how_to_compare,
    how_to_confirm,
    how_to_end,
    is_slower_than_before,
)


def timed(call_ns: int, baseline_ns: int, nr: int = 48) -> Trial:
    measurement = Measurement(
        candidate=Timing(calls_per_sample=1, samples_ns=(call_ns,) * 5),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=1, samples_ns=(baseline_ns,) * 5),
    )
    return make_trial(nr=nr, measurement=measurement)


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([timed(800, 1000)], False),
        ([timed(1190, 1490)], False),
        ([timed(1210, 1000)], True),
        ([timed(800, 1510)], True),
        ([timed(100, 200)], False),
        ([timed(9000, 1000, nr=32)], False),  # it was never timed before
        ([timed(9000, 1000, nr=32), timed(800, 1000), make_failed_trial()], False),
        ([timed(9000, 1000, nr=32), timed(1210, 1000)], True),
    ],
)
def test_what_takes_much_longer_than_before_was_disturbed(
    trials: list[Trial], *, expected: bool
) -> None:
    earlier = [make_failed_trial(), timed(1600, 1000), timed(800, 2000)]

    assert is_slower_than_before(trials, earlier) is expected


@pytest.mark.parametrize(
    ("call_s", "threads", "processes"),
    [(3e-6, 2, 6), (99e-6, 16, 6), (101e-6, 2, 3), (3e-6, 1, 3), (6e-3, 2, 1)],
)
def test_short_calls_are_confirmed_in_several_processes(
    call_s: float, threads: int, processes: int
) -> None:
    sampling = how_to_confirm(call_s, threads)

    assert sampling.processes == processes
    assert sampling.stage is Stage.CONFIRM


def test_time_for_each_process_is_set_aside() -> None:
    alone = confirming_s(3e-6, 30.0, threads=1, finalists=1)
    several = confirming_s(3e-6, 30.0, threads=2, finalists=1)

    assert several == pytest.approx(2 * alone)


def test_finalists_of_short_calls_meet_in_three_processes() -> None:
    short, long = how_to_end(3e-6), how_to_end(6e-3)

    assert (short.processes, long.processes) == (3, 1)
    assert short.processes * short.pairs >= long.pairs
    budget = {"call_s": 2e-3, "budget_s": 1.0}
    assert short.processes * short.affordable_pairs(8, **budget) <= long.affordable_pairs(
        8, **budget
    )


@pytest.mark.parametrize(("call_s", "processes"), [(3e-6, 6), (101e-6, 3), (6e-3, 1)])
def test_short_calls_of_a_range_are_compared_in_six_processes(
    call_s: float, processes: int
) -> None:
    sampling = how_to_compare(call_s)

    assert (sampling.processes, sampling.stage) == (processes, Stage.FINAL)


def test_a_first_timing_has_nothing_to_be_compared_with() -> None:
    assert not is_slower_than_before([timed(800, 1000)], [])
