"""What pages count and list is what trials say, whatever the order and the size of a page."""

from dataclasses import replace
from math import log
from pathlib import Path

import pytest
from samples import (
    CONDITIONS,
    CONTEXT,
    CPU,
    FAST_CONDITIONS,
    PROBLEM,
    SIBLING_CPU,
    add_build,
    make_disturbed_trial,
    make_trial,
)
from sqlalchemy import Engine, select

from gemm_tuner.domain.record import Conditions, Trial
from gemm_tuner.domain.rows import Rows
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.store.listing import MAX_CURVE_SIDE, Cursor, Listed, Listing
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.tables import verdicts
from gemm_tuner.store.tallies import Counting
from gemm_tuner.store.verdicts.figures import Standing
from gemm_tuner.trust.attestation import MeasuringKeys

KEY = problem_id(PROBLEM)


def _of_m(m: int, call_ns: int, conditions: Conditions = CONDITIONS) -> Trial:
    problem = replace(PROBLEM, m=Rows(low=m, high=m))
    return make_trial(problem=problem, call_ns=call_ns, conditions=conditions)


def _fill(engine: Engine) -> list[Trial]:
    trials = [
        _of_m(1, 500, conditions=FAST_CONDITIONS),
        _of_m(8, 800),
        _of_m(9, 1000),
        _of_m(600, 2000),
        replace(_of_m(64, 700), cpu=SIBLING_CPU),
    ]
    add_build(Repository(engine))
    for trial in trials:
        Repository(engine).add_trial(trial)
    Repository(engine).add_trial(make_disturbed_trial())
    return trials


def test_counts_are_those_of_the_trials(engine: Engine) -> None:
    _fill(engine)

    tallies = Counting(engine).tallies()
    here = Counting(engine).tallies(CPU.exact_key)

    by_standing = {(tally.cpu_key, tally.standing): tally.count for tally in tallies.groups}
    assert by_standing == {
        (CPU.exact_key, Standing.TUNED): 2,
        (CPU.exact_key, Standing.TIE): 1,
        (CPU.exact_key, Standing.BASELINE): 1,
        (CPU.exact_key, Standing.DOUBTED): 1,
        (SIBLING_CPU.exact_key, Standing.TUNED): 1,
    }
    assert sum(tally.count for tally in here.groups) == 5
    classes = {(tally.rows_class, tally.standing): tally.count for tally in here.shapes}
    assert classes[0, Standing.TUNED] == classes[1, Standing.TUNED] == 1  # m of 1, and to 8
    assert classes[2, Standing.TIE] == 1  # from 9
    assert classes[4, Standing.BASELINE] == 1  # above 512
    assert sum(step.count for step in here.ratios) == 5
    for step in here.ratios:
        if step.standing is Standing.TIE:
            assert step.low <= log(1.0) < step.high
    [share] = [step for step in here.shares if step.low < 0.05 and step.standing is Standing.TUNED]
    flop = 2 * 3072 * 768
    assert share.low <= flop / 500e-9 / FAST_CONDITIONS.peak_flop_per_s < share.high


def test_what_another_key_attests_is_counted_apart(engine: Engine, tmp_path: Path) -> None:
    _fill(engine)

    groups = Counting(engine, MeasuringKeys(tmp_path)).tallies().groups

    assert {tally.standing for tally in groups} == {None}


def test_an_empty_database_has_no_counts(engine: Engine) -> None:
    tallies = Counting(engine).tallies()

    assert (tallies.groups, tallies.shapes, tallies.ratios, tallies.shares) == ((), (), (), ())


def test_figures_follow_the_verdict(engine: Engine) -> None:
    repository = Repository(engine)
    add_build(repository)
    repository.add_trial(make_trial(call_ns=800, conditions=FAST_CONDITIONS))
    query = select(verdicts.c.standing, verdicts.c.call_ns, verdicts.c.peak_share)
    with engine.connect() as connection:
        before = connection.execute(query).one()

    repository.add_trial(make_trial(call_ns=500, nr=32, minute=1, conditions=None))

    with engine.connect() as connection:
        after = connection.execute(query).one()
    flop = PROBLEM.flop(128)
    assert before == ("tuned", 800.0, pytest.approx(flop / 800e-9 / 1e15))
    assert after == ("tuned", 500.0, None)


@pytest.mark.parametrize("peak", [0.0, -1.0, 1e-300, float("inf")])
def test_what_is_no_peak_gives_no_share(peak: float) -> None:
    conditions = Conditions(
        peak_flop_per_s=peak, noise=0.0, huge_pages="", kernel_release="", microcode=""
    )

    assert conditions.share_of_peak(10**9, 1000.0, 1) is None


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_answers_of_a_cpu_come_in_order(engine: Engine, limit: int) -> None:
    trials = _fill(engine)

    found: list[Listed] = []
    after = None
    while True:
        page = Listing(engine).of_cpu(CPU.exact_key, limit=limit, after=after)
        found += page.rows
        if page.next_cursor is None:
            break
        after = Cursor.parse(page.next_cursor.text)

    believed = [one.problem for one in found if one.standing is not Standing.DOUBTED]
    assert believed == [trial.problem for trial in trials if trial.cpu == CPU]
    only = Listing(engine).of_cpu(CPU.exact_key, limit=100, standing=Standing.TIE)
    assert [one.problem.m.low for one in only.rows] == [9]


def test_a_curve_has_the_nearest_m_and_no_other_layer(engine: Engine) -> None:
    repository = Repository(engine)
    add_build(repository)
    for m in range(1, 2 * MAX_CURVE_SIDE + 20, 2):
        repository.add_trial(_of_m(m, 500 + m))
    other = replace(PROBLEM, m=Rows(low=2, high=2), n=64)
    repository.add_trial(make_trial(problem=other))
    middle = replace(PROBLEM, m=Rows(low=51, high=51))

    curve = Listing(engine).of_layer(middle, CPU.exact_key, CONTEXT)

    assert [one.problem.m.low for one in curve] == list(range(11, 60, 2))
    assert {one.problem.n for one in curve} == {PROBLEM.n}
    assert Listing(engine).of_layer(middle, SIBLING_CPU.exact_key, CONTEXT) == ()


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_trials_come_in_order_without_those_from_elsewhere(engine: Engine, limit: int) -> None:
    repository = Repository(engine)
    own = [make_trial(minute=minute) for minute in range(5)]
    # The same CPU with another number of cores is another row, and the same place.
    own.append(make_trial(minute=7, cpu=replace(CPU, physical_cores=1)))
    for trial in own:
        repository.add_trial(trial)
    repository.add_imported([make_trial(minute=9)])

    found: list[Trial] = []
    before = None
    while True:
        page = Listing(engine).tried(KEY, CPU.exact_key, CONTEXT, limit=limit, before=before)
        found += page.trials
        before = page.next_before
        if before is None:
            break

    assert found == own[::-1]


@pytest.mark.parametrize("text", ["", "x", "W10", "bnVsbA", "=", "\udcff", "é", "9" * 1000])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="begin at the first page"):
        Cursor.parse(text)
