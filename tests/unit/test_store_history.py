"""All that was tried, read problem by problem."""

from dataclasses import replace

import pytest
from samples import CONTEXT, CPU, PROBLEM, make_failed_trial, make_trial
from sqlalchemy import Engine, text

from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import SweepEnd
from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.history import History
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.tables import Origin

OTHER = Problem.parse("f32 1x8x8 nk none")


def test_each_problem_has_its_trials_with_their_origin(
    repository: Repository, engine: Engine
) -> None:
    own, failed, other = make_trial(), make_failed_trial(minute=1), make_trial(problem=OTHER)
    repository.add_trial(own)
    repository.add_trial(failed)
    repository.add_imported([other])
    told: list[tuple[int, int]] = []

    found = {
        history.problem: history
        for history in History(engine).problems(lambda *step: told.append(step))
    }

    assert [one.trial for one in found[PROBLEM].trials] == [own, failed]
    assert all(one.is_believed for one in found[PROBLEM].trials)
    [imported] = found[OTHER].trials
    assert (imported.trial, imported.origin, imported.is_believed) == (
        other,
        Origin.IMPORTED,
        False,
    )
    assert told == [(1, 2), (2, 2)]


def test_what_nobody_believed_attests_is_told_apart(repository: Repository, engine: Engine) -> None:
    repository.add_trial(make_trial())
    repository.add_trial(make_failed_trial(minute=1))
    with engine.begin() as connection:
        connection.execute(text("UPDATE trials SET attestation = NULL"))

    [history] = History(engine).problems()

    assert [one.is_believed for one in history.trials] == [False, True]  # a failure counts


def test_a_search_that_came_to_its_end_is_known(repository: Repository, engine: Engine) -> None:
    trial = make_trial()
    repository.add_trial(trial)
    sweep = {"toolchain": trial.toolchain, "generator": trial.generator}
    for baseline, is_exhausted in (("onednn 3.2.0", True), ("mkl 1", False)):
        end = SweepEnd(baseline=baseline, is_exhausted=is_exhausted, budget_s=3.0)
        repository.mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **sweep, end=end)
    # The end of a search in one format is none of a sweep.
    end = SweepEnd(baseline="blis 2", is_exhausted=True, budget_s=3.0)
    repository.mark_ended(
        PROBLEM, CPU.exact_key, CONTEXT, **sweep, end=end, packed_format="f32 768x3072 panels nr16"
    )

    [history] = History(engine).problems()

    key = (CPU.exact_key, CONTEXT, trial.toolchain, trial.generator, "onednn 3.2.0")
    assert history.exhausted == {key}


def test_a_damaged_row_is_an_error(repository: Repository, engine: Engine) -> None:
    repository.add_trial(replace(make_trial(), detail="as it was"))
    with engine.begin() as connection:
        connection.execute(text("UPDATE trials SET document = replace(document, 'was', 'is')"))

    with pytest.raises(StoreFailed, match="damaged"):
        list(History(engine).problems())
