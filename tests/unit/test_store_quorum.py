"""A kernel is named once as many hosts found it by themselves as the quorum asks for."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hosts import Hosts
from samples import (
    CONTEXT,
    CPU,
    PROBLEM,
    SIBLING_CPU,
    add_build,
    make_artifact,
    make_disturbed_trial,
    make_failed_trial,
    make_trial,
)
from sqlalchemy import Engine

from gemm_tuner.domain.job import Job
from gemm_tuner.domain.quorum import lacks_hosts
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.select.choose import Match, choose
from gemm_tuner.store.verdicts.withheld import Withheld

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
OTHER = b"\x7fELF of another candidate"


@pytest.fixture
def hosts(engine: Engine, tmp_path: Path) -> Hosts:
    hosts = Hosts(engine, tmp_path, ["service", "a", "b", "c"])
    hosts("service").require_quorum(2)
    add_build(hosts("service"))
    add_build(hosts("service"), OTHER)
    return hosts


def ask(hosts: Hosts, name: str = "service", *, quorum: int | None = None) -> Match:
    return choose(hosts(name, quorum=quorum), PROBLEM, cpu=CPU, context=CONTEXT)


def ask_for(hosts: Hosts) -> Job:
    job, _is_new = hosts.jobs("service").submit(
        PROBLEM,
        class_key=CPU.class_key,
        context=CONTEXT,
        budget_s=30.0,
        priority=0,
        owner="me",
        idempotency_key=None,
        now=NOW,
    )
    return job


def claim(hosts: Hosts, name: str) -> str | None:
    """Return the id of the job that a host takes, None if there is none for it."""
    job = hosts.jobs(name).claim(name, class_keys=[CPU.class_key], now=NOW, lease_s=60.0)
    return None if job is None else job.id


def withheld(hosts: Hosts, name: str) -> Withheld:
    return hosts(name).withheld(PROBLEM, class_key=CPU.class_key, context=CONTEXT)


def told(match: Match) -> str:
    return "\n".join(match.explain)


def decided(match: Match) -> tuple[Decision, bool]:
    return match.verdict.decision, match.verdict.artifact is not None


def unsteady(trial: Trial) -> Trial:
    """Return a trial whose calls take up to 5 % more or less, and so have an interval."""
    assert trial.measurement is not None
    timing = trial.measurement.candidate
    steps = (0.95, 1.05, 0.98, 1.02, 1.0)
    samples = [round(steps[i % 5] * each) for i, each in enumerate(timing.samples_ns)]
    candidate = replace(timing, samples_ns=tuple(samples))
    return replace(trial, measurement=replace(trial.measurement, candidate=candidate))


WITHHELD = (Decision.TIE, False)
TUNED = (Decision.TUNED, True)


def test_one_host_alone_has_no_kernel_named(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())

    match = ask(hosts)

    assert decided(match) == WITHHELD
    assert "tuned on 1 of 2 hosts that the quorum asks for" in told(match)
    assert lacks_hosts(match.verdict)


def test_two_hosts_that_find_the_same_have_it_served(hosts: Hosts) -> None:
    hosts("a").add_trial(unsteady(make_trial(call_ns=800)))
    hosts("b").add_trial(unsteady(make_trial(call_ns=805, minute=1)))

    match = ask(hosts)

    assert decided(match) == TUNED
    assert match.verdict.ratio is not None
    assert match.verdict.ratio.median == pytest.approx(
        1000 / 805, rel=1e-3
    )  # the least, and no mean
    assert "disagree" not in told(match)


def test_one_host_counts_once_however_often_it_measures(hosts: Hosts) -> None:
    for minute in range(4):
        hosts("a").add_trial(make_trial(minute=minute))

    assert decided(ask(hosts)) == WITHHELD


def test_whom_nobody_believes_counts_not_at_all(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())
    hosts.stranger().add_trial(make_trial(minute=1))

    match = ask(hosts)

    assert decided(match) == WITHHELD
    assert [one.key for one in match.verdict.hosts] == [hosts.key("a")]


def test_records_from_elsewhere_count_not_at_all(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())
    hosts("b").add_imported([make_trial(minute=1)])

    assert decided(ask(hosts)) == WITHHELD


def test_different_kernels_are_not_the_same(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())
    hosts("b").add_trial(make_trial(minute=1, nr=32, artifact=make_artifact(OTHER)))

    match = ask(hosts)

    assert decided(match) == WITHHELD
    assert "because tuned on 1 of 2 hosts that the quorum asks for" in told(match)
    assert lacks_hosts(match.verdict), "one did not measure what the other found"


def test_who_found_another_kernel_is_asked_for_that_of_the_first(hosts: Hosts) -> None:
    """So it is where the quorum was raised after both had searched."""
    hosts("a").add_trial(make_trial(call_ns=500))
    hosts("b").add_trial(make_trial(minute=1, nr=32, artifact=make_artifact(OTHER)))

    job = ask_for(hosts)

    assert job.measured_by == {hosts.key("a")}
    assert [claim(hosts, name) for name in "ab"] == [None, job.id]
    found = withheld(hosts, "b")
    assert not hosts("b").has_measured(found)
    assert hosts("b").found_by_others(found) == (make_trial().candidate,)

    hosts("b").add_trial(make_trial(call_ns=510, minute=2))

    assert decided(ask(hosts)) == TUNED


def test_hosts_that_measured_what_each_other_found_are_asked_no_more(hosts: Hosts) -> None:
    for minute, (name, call_ns, nr) in enumerate(
        [("a", 900, 16), ("b", 1200, 16), ("b", 900, 32), ("a", 1200, 32)]
    ):
        binary = make_artifact(OTHER) if nr == 32 else make_artifact()
        trial = make_trial(minute=minute, call_ns=call_ns, nr=nr, artifact=binary)
        hosts(name).add_trial(trial)

    assert decided(ask(hosts))[1] is False
    assert not lacks_hosts(ask(hosts).verdict)
    assert ask_for(hosts).measured_by == frozenset(), "nobody could take it"


def test_the_kernel_on_which_hosts_agree_is_served_not_the_fastest(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial(call_ns=900))
    hosts("b").add_trial(make_trial(call_ns=500, minute=1, nr=32, artifact=make_artifact(OTHER)))
    hosts("b").add_trial(make_trial(call_ns=910, minute=2))

    match = ask(hosts)

    assert decided(match) == TUNED
    assert match.verdict.artifact == make_artifact()


def test_a_host_that_finds_otherwise_is_shown(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial(call_ns=800))
    hosts("b").add_trial(make_trial(call_ns=1100, minute=1))

    match = ask(hosts)

    assert decided(match) == (Decision.BASELINE, False)
    assert "tuned on 1 of 2 hosts" in told(match)
    assert "the 2 hosts disagree" in told(match)
    assert "tuned, 1.250 times" in told(match)
    assert "baseline, 0.909 times" in told(match)

    hosts("c").add_trial(make_trial(call_ns=810, minute=2))

    match = ask(hosts)
    assert decided(match) == TUNED
    assert match.verdict.ratio is not None
    assert match.verdict.ratio.median == pytest.approx(1000 / 810)
    assert "the 3 hosts disagree" in told(match)


def test_other_speeds_of_the_same_kernel_are_a_disagreement(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial(call_ns=500))
    hosts("b").add_trial(make_trial(call_ns=900, minute=1))

    match = ask(hosts)

    assert decided(match) == TUNED
    assert "the 2 hosts disagree" in told(match)


def test_two_ties_are_served_as_a_tie(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial(call_ns=995))
    hosts("b").add_trial(make_trial(call_ns=800, minute=1))

    assert decided(ask(hosts)) == (Decision.TIE, True)


def test_a_disturbed_measurement_is_no_finding(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())
    hosts("b").add_trial(make_disturbed_trial(minute=1))

    assert decided(ask(hosts)) == WITHHELD


def test_a_failure_on_any_host_speaks_against_a_kernel(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())
    hosts("b").add_trial(make_trial(minute=1))
    hosts.stranger().add_trial(make_failed_trial(minute=2))

    assert ask(hosts).verdict.artifact is None


def test_a_key_that_is_believed_no_more_does_not_count(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())
    hosts("b").add_trial(make_trial(minute=1))
    assert decided(ask(hosts)) == TUNED

    hosts.forget("b")

    assert decided(ask(hosts)) == WITHHELD
    assert ask_for(hosts).measured_by == {hosts.key("a")}, "another host takes its place"
    hosts("service").derive_again()
    assert decided(ask(hosts)) == WITHHELD


def test_a_job_for_others_is_for_all_once_the_quorum_was_lowered(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())
    job = ask_for(hosts)
    assert ask_for(hosts) == job
    assert claim(hosts, "a") is None

    hosts("service").require_quorum(1)
    again = ask_for(hosts)

    assert (again.id, again.measured_by) == (job.id, frozenset())
    assert claim(hosts, "a") == job.id


def test_a_job_for_hosts_that_never_come_ends_though_its_class_is_run(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())
    job, jobs = ask_for(hosts), hosts.jobs("a")
    late = job.changed_at + timedelta(days=4)

    for name, is_over in (("b", False), ("a", True)):
        hosts.jobs(name).see_worker(name, class_key=CPU.class_key, cpu_key=CPU.exact_key, now=late)
        jobs.end_untaken(late)
        found = jobs.get(job.id)
        assert found is not None
        assert found.state.is_over is is_over
        jobs.forget_worker(name)


def test_the_quorum_is_raised_and_lowered(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())
    hosts("b").add_trial(make_trial(minute=1))
    before = ask(hosts).serial

    assert hosts("service").require_quorum(3) == 2
    assert decided(ask(hosts)) == WITHHELD
    assert hosts("service").require_quorum(1) == 3
    assert decided(ask(hosts)) == TUNED
    assert hosts("service").require_quorum(1) == 1
    assert ask(hosts).serial >= before


def test_who_lowers_the_quorum_in_the_database_alone_gains_nothing(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())

    hosts("a").require_quorum(1)

    assert decided(ask(hosts, "a")) == TUNED
    assert decided(ask(hosts, quorum=2)) == WITHHELD
    hosts("service").derive_again()
    assert decided(ask(hosts, quorum=2)) == WITHHELD


def test_a_verdict_of_another_host_is_not_believed_but_its_trials(
    hosts: Hosts, engine: Engine
) -> None:
    """A host that wrote a verdict for others would need no other host."""
    hosts("b").add_trial(make_trial())
    hosts("a").require_quorum(1)
    with engine.begin() as connection:
        document, signature = connection.exec_driver_sql(
            "SELECT document, attested_by FROM verdicts"
        ).one()
    assert signature == hosts.key("a")
    assert make_artifact().sha256 in document

    assert decided(ask(hosts, quorum=2)) == WITHHELD


def test_hosts_of_a_class_count_for_each_of_its_cpus(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial())
    hosts("b").add_trial(make_trial(minute=1, cpu=SIBLING_CPU))

    match = ask(hosts)
    other = choose(hosts("service"), PROBLEM, cpu=SIBLING_CPU, context=CONTEXT)

    assert (decided(match), match.verdict.basis) == (TUNED, Basis.MEASURED)
    assert (decided(other), other.verdict.basis) == (TUNED, Basis.MEASURED)


def test_a_guess_from_what_one_host_proved_is_not_served(hosts: Hosts) -> None:
    hosts("a").add_trial(make_trial(stage=Stage.PREDICTED, measurement=None))
    assert ask(hosts).verdict.basis is Basis.NONE

    hosts("service").require_quorum(1)

    assert ask(hosts).verdict.basis is Basis.PREDICTED


def test_with_one_host_enough_disagreement_is_shown_and_the_newest_counts(
    engine: Engine, tmp_path: Path
) -> None:
    hosts = Hosts(engine, tmp_path, ["service", "a", "b"])
    add_build(hosts("service"))
    hosts("a").add_trial(make_trial(call_ns=800))
    assert ask(hosts).verdict.hosts == ()

    hosts("b").add_trial(make_trial(call_ns=1100, minute=1))

    match = ask(hosts)
    assert match.verdict.decision is Decision.BASELINE
    assert "the 2 hosts disagree" in told(match)


def test_a_damaged_verdict_keeps_nobody_from_tuning_anew(hosts: Hosts, engine: Engine) -> None:
    hosts("a").add_trial(make_trial())
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE verdicts SET document = '{}'")

    found = hosts("b").withheld(PROBLEM, class_key=CPU.class_key, context=CONTEXT)

    assert found.hosts == ()
