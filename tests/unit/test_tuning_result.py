"""What a sweep found, of all its trials."""

from collections.abc import Sequence
from dataclasses import replace

from samples import CONTEXT, CPU, PROBLEM, make_trial

from gemm_tuner.domain.measurement import Timing
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.tuning.result import make_result


def _in_rounds_of(baseline_ns: int, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials beside a baseline that takes so long: those of one time had its rounds."""
    timing = Timing(calls_per_sample=1, samples_ns=(baseline_ns,) * 12)
    return [
        replace(one, measurement=replace(one.measurement, baseline_timing=timing))
        for one in trials
        if one.measurement
    ]


def _together(trials: Sequence[Trial]) -> list[Trial]:
    found = make_result(PROBLEM, CPU, CONTEXT, trials, complete=False, resumed=False)
    return list(found.together)


def test_a_final_is_told_of_rather_than_an_older_joint_confirmation() -> None:
    adopted = _in_rounds_of(1000, [make_trial(nr=48), make_trial(nr=32)])
    final = _in_rounds_of(
        1001, [make_trial(nr=nr, minute=1, stage=Stage.FINAL) for nr in (16, 48, 64)]
    )
    confirmed = _in_rounds_of(1002, [make_trial(nr=16, minute=2)])

    assert _together(adopted) == adopted
    assert _together([*adopted, *final]) == final
    assert _together([*adopted, *final, *confirmed]) == final


def test_who_left_a_joint_confirmation_early_is_told_of_beside_the_others() -> None:
    confirmed = _in_rounds_of(1000, [make_trial(nr=48), make_trial(nr=32)])
    left = _in_rounds_of(1000, [make_trial(nr=16, stage=Stage.FINAL)])

    assert _together([*confirmed, *left]) == [*confirmed, *left]


def test_a_single_kernel_is_told_of_as_it_was_confirmed() -> None:
    trials = [make_trial()]

    assert _together(trials) == trials
