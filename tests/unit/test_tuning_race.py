"""Who won an earlier race is remembered, until something else is installed."""

from dataclasses import replace

import pytest
from samples import CONTEXT, make_trial

from gemm_tuner.bench.baselines.choose import Race
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.measurement import Interference, Raced
from gemm_tuner.domain.record import Trial
from gemm_tuner.tuning.race import expected_baseline, find_race
from gemm_tuner.tuning.settings import SweepSettings

RACED = (
    Raced(package="numpy 2", baseline="openblas 0.3 + pass", call_ns=10.0),
    Raced(package="onednn-cpu-gomp 1", baseline="onednn 3.2.0", call_ns=11.0),
)


def _trial(raced: tuple[Raced, ...]) -> Trial:
    trial = make_trial()
    assert trial.measurement is not None
    return replace(trial, measurement=replace(trial.measurement, raced=raced))


def _settings(baseline: str = "auto", budget_s: float = 20.0) -> SweepSettings:
    return SweepSettings(toolchain=find_toolchain(), baseline=baseline, budget_s=budget_s)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def packages(limit_s: float) -> tuple[str, ...]:
        slow = ("onnxruntime 1",) if limit_s > 5.0 else ()
        return ("onednn-cpu-gomp 1", "numpy 2", *slow)

    monkeypatch.setattr("gemm_tuner.tuning.race.raced_packages", packages)


def test_the_newest_race_is_taken_again() -> None:
    older = (replace(RACED[1], call_ns=5.0), RACED[0])
    settings = _settings()

    race = find_race([_trial(older), _trial(RACED), _trial(())], settings, context=CONTEXT)

    assert race.earlier == RACED
    assert race.limit_s == 3.0
    assert expected_baseline(settings, race) == "openblas 0.3 + pass"


def test_there_is_a_new_race_where_the_one_before_was_disturbed() -> None:
    disturbed = _trial(RACED)
    assert disturbed.measurement is not None
    interference = Interference(disturbed_rounds=1.0, others=1.5, stolen=0.0)
    measurement = replace(disturbed.measurement, interference=interference)

    race = find_race(
        [_trial(RACED), replace(disturbed, measurement=measurement)], _settings(), context=CONTEXT
    )

    assert race.earlier == ()


def test_there_is_a_new_race_where_more_take_part() -> None:
    settings = _settings(budget_s=100.0)

    race = find_race([_trial(RACED)], settings, context=CONTEXT)

    assert race.earlier == ()
    assert expected_baseline(settings, race) is None


def test_there_is_a_new_race_where_one_that_lacked_time_has_it() -> None:
    late = Raced(package="onnxruntime 1", baseline="", call_ns=0.0, lacked_time=True)
    raced = (*RACED, late)
    long, short = _settings(budget_s=100.0), _settings(budget_s=1.0)

    assert find_race([_trial(raced)], long, context=CONTEXT).earlier == ()
    assert find_race([_trial(raced)], short, context=CONTEXT).earlier == raced


def test_a_smaller_budget_goes_on_beside_the_same_baseline() -> None:
    slow = Raced(package="onnxruntime 1", baseline="onnxruntime 1", call_ns=5.0)
    raced = (slow, *RACED)
    long, short = _settings(budget_s=100.0), _settings(budget_s=1.0)

    assert find_race([_trial(raced)], long, context=CONTEXT).earlier == raced
    assert find_race([_trial(raced)], short, context=CONTEXT).earlier == raced


def test_a_winner_that_is_not_installed_any_more_does_not_count() -> None:
    gone = Raced(package="mkl 1", baseline="mkl 1", call_ns=5.0)

    assert find_race([_trial((gone, *RACED))], _settings(), context=CONTEXT).earlier == ()


def test_a_race_of_other_threads_does_not_count() -> None:
    several = ExecutionContext(threads=2)

    assert find_race([_trial(RACED)], _settings(), context=several).earlier == ()


def test_each_regime_has_a_race_of_its_own() -> None:
    cold = replace(CONTEXT, regime=Regime.COLD_WEIGHTS)
    raced = tuple(replace(one, regime=Regime.COLD_WEIGHTS) for one in RACED[::-1])
    trials = [_trial(RACED), replace(_trial(raced), context=cold)]

    assert find_race(trials, _settings(), context=CONTEXT).earlier == RACED
    assert find_race(trials, _settings(), context=cold).earlier == raced
    assert find_race(trials[:1], _settings(), context=cold) == Race(
        limit_s=3.0, threads=1, regime=Regime.COLD_WEIGHTS
    )


def test_a_race_with_hot_weights_does_not_count_for_cold_ones() -> None:
    """Records of older versions have it."""
    cold = replace(CONTEXT, regime=Regime.COLD_WEIGHTS)
    trial = replace(_trial(RACED), context=cold)

    assert find_race([trial], _settings(), context=cold).earlier == ()


def test_a_named_baseline_is_expected_by_its_name() -> None:
    settings = _settings("mkl")

    assert expected_baseline(settings, find_race([], settings, context=CONTEXT)) == "mkl"
