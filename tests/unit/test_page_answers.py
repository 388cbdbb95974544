"""The answers of a page follow from trials as those of the store do."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hosts import Hosts
from samples import (
    CONTEXT,
    CPU,
    FAST_CONDITIONS,
    PROBLEM,
    SIBLING_CPU,
    add_build,
    make_disturbed_trial,
    make_failed_trial,
    make_trial,
)
from sqlalchemy import Engine, text

from gemm_tuner.cli.reports.page.answers import BREAK_S, Standing, Step, read_contents
from gemm_tuner.cli.reports.page.summary import summarise
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.record import Outcome, Stage
from gemm_tuner.domain.verdict import Decision
from gemm_tuner.select.choose import choose
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.attestation import MeasuringKeys


def test_an_answer_is_the_one_of_the_store(repository: Repository, engine: Engine) -> None:
    add_build(repository)
    repository.add_trial(make_trial())
    fastest = make_trial(nr=32, call_ns=700, minute=1, conditions=FAST_CONDITIONS)
    repository.add_trial(fastest)

    [answer] = read_contents(engine, "some").answers

    stored = choose(repository, PROBLEM, cpu=CPU, context=CONTEXT).verdict
    assert answer.verdict.candidate == stored.candidate
    assert answer.measured == stored.measurement
    assert answer.standing is Standing.BELIEVED
    assert answer.gflop_per_s == pytest.approx(2 * 128 * 3072 * 768 / 700)
    assert answer.share_of_peak == pytest.approx(1e9 * answer.gflop_per_s / 1e15)


def test_a_page_tells_which_answers_fewer_hosts_confirmed_than_the_quorum_asks_for(
    engine: Engine, tmp_path: Path
) -> None:
    hosts = Hosts(engine, tmp_path, ["a", "b"])
    for name in "ab":
        MeasuringKeys().accept(hosts.key(name))
    hosts("a").add_trial(make_trial())
    assert not any("host" in words for words in _summary(engine))
    hosts("a").require_quorum(2)

    held_back, said = read_contents(engine, "some"), _summary(engine)
    hosts("b").add_trial(make_trial(minute=1))
    agreed, said_then = read_contents(engine, "some"), _summary(engine)

    assert (held_back.quorum, held_back.answers[0].hosts) == (2, 1)
    assert any("served once 2 hosts found it" in words for words in said)
    assert "1 answer of these was confirmed by fewer hosts." in said
    assert (agreed.quorum, agreed.answers[0].hosts) == (2, 2)
    assert "0 answers of these were confirmed by fewer hosts." in said_then


def _summary(engine: Engine) -> list[str]:
    section = summarise(read_contents(engine, "some"))
    return [words for block in section.blocks for words in block.words]


def test_imported_records_have_answers_that_say_so(repository: Repository, engine: Engine) -> None:
    repository.add_imported([make_trial()])

    [answer] = read_contents(engine, "some").answers

    assert answer.verdict.decision is Decision.TUNED
    assert answer.standing is Standing.IMPORTED


def test_what_is_believed_goes_before_what_is_not(repository: Repository, engine: Engine) -> None:
    repository.add_trial(make_trial(call_ns=900))
    repository.add_trial(make_trial(call_ns=500, nr=32, minute=1))
    repository.add_imported([make_trial(call_ns=300, nr=16, minute=2)])
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE trials SET attestation = NULL WHERE document LIKE '%8x32%'")
        )

    [answer] = read_contents(engine, "some").answers

    assert answer.measured.candidate_median_ns == 900
    with engine.begin() as connection:
        connection.execute(text("UPDATE trials SET attestation = NULL"))
    [answer] = read_contents(engine, "some").answers
    assert answer.measured.candidate_median_ns == 500
    assert answer.standing is Standing.UNATTESTED


def test_each_cpu_and_context_has_an_answer(repository: Repository, engine: Engine) -> None:
    cold = ExecutionContext(threads=2, regime=Regime.COLD_WEIGHTS)
    repository.add_trial(make_trial())
    repository.add_trial(make_trial(minute=1, context=cold))
    repository.add_trial(make_trial(minute=2, cpu=SIBLING_CPU))
    repository.add_trial(make_failed_trial(minute=3))

    contents = read_contents(engine, "some")

    found = {(answer.verdict.cpu_key, answer.context) for answer in contents.answers}
    # What failed on the first CPU has no answer there, in either context.
    assert found == {(SIBLING_CPU.exact_key, CONTEXT)}
    assert contents.unanswered == 2
    assert contents.outcomes == {Outcome.CORRECT: 3, Outcome.CRASHED: 1}


def test_a_disturbed_measurement_is_a_tie_that_says_why(
    repository: Repository, engine: Engine
) -> None:
    repository.add_trial(make_disturbed_trial())

    [answer] = read_contents(engine, "some").answers

    assert answer.verdict.decision is Decision.TIE
    assert "disturbed" in (answer.verdict.doubt or "")


def test_a_search_is_told_in_the_order_of_its_dates(repository: Repository, engine: Engine) -> None:
    in_race = [
        make_trial(stage=Stage.RACE, call_ns=call_ns, nr=nr, minute=minute)
        for call_ns, nr, minute in ((805, 32, 2), (1000, 16, 1))
    ]
    proof = make_trial(stage=Stage.RACE, nr=64, measurement=None)
    of_another = make_trial(stage=Stage.RACE, call_ns=1, nr=16, generator="another")
    for trial in (*in_race, proof, of_another, make_trial(minute=3)):
        repository.add_trial(trial)

    [answer] = read_contents(engine, "some").answers

    assert list(answer.search.best_ns) == [1000, 805, 800]
    assert answer.search.settled_at == 2
    assert answer.search.over_last(1) == 1.25
    assert answer.search.over_last(99) == 1
    assert (answer.search.tried, answer.search.failed) == (4, 0)


def test_time_goes_to_what_ended_it_without_breaks(repository: Repository, engine: Engine) -> None:
    proof = make_trial(stage=Stage.RACE, measurement=None)
    race = replace(make_trial(stage=Stage.RACE), created_at=proof.created_at + timedelta(seconds=2))
    again = timedelta(seconds=BREAK_S + 1)
    confirmed = make_trial()
    later = replace(confirmed, created_at=race.created_at + again)
    on_two_threads = make_trial(
        context=ExecutionContext(threads=2), created_at=race.created_at + timedelta(seconds=1)
    )
    for trial in (later, race, proof, on_two_threads):
        repository.add_trial(trial)

    contents = read_contents(engine, "some")

    spent = {step: (one.records, one.seconds) for step, one in contents.spent.items()}
    assert spent == {Step.PROOF: (1, 0.0), Step.RACE: (1, 2.0), Step.CONFIRM: (2, 0.0)}
    assert contents.breaks == 1


def test_an_answer_for_one_m_tells_the_time_of_the_newest_library_for_a_range(
    repository: Repository, engine: Engine
) -> None:
    add_build(repository)
    alone = make_trial(conditions=FAST_CONDITIONS)
    several = Candidate.parse(f"..9 {alone.candidate.text} | {alone.candidate.text}")
    repository.add_trial(alone)
    for minute, call_ns in ((1, 850), (2, 810)):
        repository.add_trial(
            make_trial(
                call_ns=call_ns,
                minute=minute,
                candidate=several,
                stage=Stage.FINAL,
                conditions=FAST_CONDITIONS,
            )
        )

    [answer] = read_contents(engine, "some").answers

    assert answer.in_range_ns == 810
    assert answer.verdict.candidate == alone.candidate
