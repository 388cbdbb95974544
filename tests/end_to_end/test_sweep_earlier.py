"""What a sweep takes from earlier ones: of other baselines, generators, flags, and regimes."""

from dataclasses import replace
from itertools import repeat

import pytest
from planted_times import plant_speeds
from tuned import PROBLEM, tune

from gemm_tuner.build.compile import _TOOLCHAIN_FLAGS
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.record import Outcome, Stage
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning import earlier
from gemm_tuner.tuning.generator import generator_version


def _let_generator_be_older(patched: pytest.MonkeyPatch) -> None:
    for module in ("attempt", "earlier", "finished", "sweep"):
        name = f"gemm_tuner.tuning.{module}.generator_version"
        patched.setattr(name, lambda: "gemm-tuner 0.0.1+older")


@pytest.mark.proof
@pytest.mark.baseline("onednn")
def test_a_sweep_beside_another_baseline_is_another_sweep(database: str) -> None:
    beside_scalar = tune(database, baseline="scalar")

    beside_onednn = tune(database, baseline="onednn").verdict.measurement
    again = tune(database, baseline="scalar")

    assert beside_onednn is not None
    assert beside_onednn.baseline.startswith("onednn")
    assert again.resumed
    assert again.verdict == beside_scalar.verdict


@pytest.mark.proof
def test_the_winner_of_one_thread_is_cut_for_two_whatever_the_time(database: str) -> None:
    space = Space(problem=PROBLEM, cpu=detect_cpu())
    for_two = replace(space, threads=2)
    winner = next(one for one in shortlist(space, 24) if len(for_two.cuts_of(one)) > 1)
    tune(database, baseline="scalar", chosen=[winner])
    contexts = [ExecutionContext(threads=2)]

    tune(database, baseline="scalar", budget_s=1e-6, contexts=contexts)

    trials = Repository(open_database(database)).trials()
    timed = [trial for trial in trials if trial.context in contexts and trial.measurement]
    assert {trial.candidate.parts for trial in timed} == {1, 2}


@pytest.mark.proof
@pytest.mark.parametrize("threads", [1, 2])
def test_what_won_with_another_generator_is_tried_whatever_the_time(
    database: str, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    unlikely = shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 60)[-1]
    with monkeypatch.context() as before:
        _let_generator_be_older(before)
        tune(database, baseline="scalar", chosen=[unlikely])
    # Its sources are not these: nothing that it measured stands.
    present = generator_version()
    monkeypatch.setattr(earlier, "stands", lambda trial, _now: trial.generator == present)

    contexts = [ExecutionContext(threads=threads)]
    tune(database, baseline="scalar", budget_s=1e-6, contexts=contexts)

    trials = Repository(open_database(database)).trials(generator=generator_version())
    assert unlikely in {trial.candidate for trial in trials if trial.measurement is not None}


@pytest.mark.proof
def test_what_an_earlier_generator_timed_is_only_confirmed_again(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sources are those of today: nothing has to be raced, and the winner is confirmed."""
    chosen = shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 3)
    with monkeypatch.context() as before:
        _let_generator_be_older(before)
        tune(database, baseline="scalar", budget_s=600.0, chosen=chosen)

    result = tune(database, baseline="scalar", budget_s=600.0, chosen=chosen)

    trials = Repository(open_database(database)).trials(generator=generator_version())
    assert {trial.stage for trial in trials} == {Stage.FINAL, Stage.CONFIRM}
    assert {trial.candidate for trial in result.finalists} == set(chosen)


@pytest.mark.proof
def test_a_finished_sweep_is_run_again_with_other_flags(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tune(database, baseline="scalar")

    name = find_toolchain().name
    monkeypatch.setitem(_TOOLCHAIN_FLAGS, name, (*_TOOLCHAIN_FLAGS[name], "-fno-inline"))
    again = tune(database, baseline="scalar")

    assert not again.resumed
    assert first.verdict.artifact != again.verdict.artifact


def test_nothing_is_proved_that_there_is_no_time_to_race(database: str) -> None:
    tune(database, baseline="scalar", budget_s=1e-6)

    trials = Repository(open_database(database)).trials()
    proved = {trial.candidate for trial in trials if trial.outcome is Outcome.CORRECT}
    assert proved == {trial.candidate for trial in trials if trial.measurement is not None}


def test_two_finalists_of_one_regime_are_tried_in_the_other_whatever_the_time(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    chosen = shortlist(Space(problem=PROBLEM, cpu=detect_cpu()), 3)
    hot = tune(database, baseline="scalar", budget_s=600.0, chosen=chosen)
    contexts = [ExecutionContext(regime=Regime.COLD_WEIGHTS)]

    cold = tune(database, baseline="scalar", budget_s=1e-6, contexts=contexts)

    assert len({trial.candidate for trial in hot.finalists}) == 3
    best_two = {trial.candidate for trial in cold.finalists}
    assert len(best_two) == 2
    assert best_two < {trial.candidate for trial in hot.finalists}


@pytest.mark.baseline("onednn")
def test_the_best_beside_another_baseline_are_tried_beside_this_one_whatever_the_time(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Space(problem=PROBLEM, cpu=detect_cpu())
    last = shortlist(shape)[-3:]  # none that a sweep tries first
    plant_speeds(monkeypatch, repeat(2.0))
    before = tune(database, baseline="scalar", budget_s=600.0, chosen=last)

    beside_onednn = tune(database, baseline="onednn", budget_s=1e-6)

    assert before.verdict.candidate in last
    assert before.verdict.candidate in {trial.candidate for trial in beside_onednn.finalists}


def test_a_finished_sweep_is_answered_without_a_trial_host(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tune(database, baseline="scalar")
    monkeypatch.delattr("gemm_tuner.tuning.host.TrialHost")

    assert tune(database, baseline="scalar").verdict == first.verdict
