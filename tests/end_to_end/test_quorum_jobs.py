"""Where a quorum asks for more hosts, jobs go to others, which measure what the first one found."""

from datetime import UTC, datetime
from itertools import repeat
from pathlib import Path

import pytest
from hosts import Hosts
from planted_times import plant_speeds, plant_speeds_of
from sqlalchemy import Engine
from working import PROBLEM, ask_for, job_now, run_job

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.domain.quorum import lacks_hosts
from gemm_tuner.domain.record import Stage
from gemm_tuner.domain.verdict import Decision
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.select.choose import Match, choose

CLASS = detect_cpu().class_key


@pytest.fixture
def hosts(engine: Engine, tmp_path: Path) -> Hosts:
    hosts = Hosts(engine, tmp_path / "keys", ["service", "a", "b", "c"])
    hosts("service").require_quorum(2)
    return hosts


def ask(hosts: Hosts) -> Match:
    return choose(hosts("service"), PROBLEM, cpu=detect_cpu(), context=ExecutionContext())


def run(hosts: Hosts, name: str, job: Job) -> Job:
    run_job(hosts.jobs(name), hosts(name), job)
    return job_now(hosts.jobs(name), job)


def next_for(hosts: Hosts, name: str) -> str | None:
    """Return the id of the job that a host would be given, which it is not."""
    jobs, now = hosts.jobs(name), datetime.now(UTC)
    job = jobs.claim("probe", class_keys=[CLASS], now=now, lease_s=60.0)
    if job is None:
        return None
    jobs.release(job.id, "probe", now)
    return job.id


def waiting(hosts: Hosts) -> list[Job]:
    return list(hosts.jobs("service").newest(10, state=JobState.WAITING))


def test_a_second_host_measures_what_the_first_found(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(1.3))
    first = run(hosts, "a", ask_for(hosts.jobs("service")))

    assert first.state is JobState.DONE
    assert "measured on 1 of 2 hosts" in first.detail
    [second] = waiting(hosts)
    assert second.owner == first.owner
    assert second.measured_by == {hosts.key("a")}
    assert next_for(hosts, "a") is None
    assert next_for(hosts, "b") == second.id
    assert lacks_hosts(ask(hosts).verdict)

    assert run(hosts, "b", second).state is JobState.DONE

    verdict = ask(hosts).verdict
    assert (verdict.decision, verdict.artifact is not None) == (Decision.TUNED, True)
    assert {one.key for one in verdict.hosts} == {hosts.key("a"), hosts.key("b")}
    assert {one.kernel for one in verdict.hosts} == {verdict.hosts[0].kernel}
    assert waiting(hosts) == []
    trials = hosts("service").attested_trials(problem=PROBLEM)
    confirmed = {one.trial.candidate for one in trials if one.trial.stage is Stage.CONFIRM}
    assert {one.trial.candidate for one in trials if one.key == hosts.key("b")} == confirmed


@pytest.mark.proof
def test_a_third_host_is_asked_where_two_disagree(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(1.3))
    run(hosts, "a", ask_for(hosts.jobs("service")))
    [second] = waiting(hosts)
    now = datetime.now(UTC)
    hosts.jobs("c").see_worker("c", class_key=CLASS, cpu_key=detect_cpu().exact_key, now=now)

    plant_speeds(monkeypatch, repeat(0.8))
    assert run(hosts, "b", second).state is JobState.DONE

    assert ask(hosts).verdict.artifact is None
    assert any("hosts disagree" in step for step in ask(hosts).explain)
    [third] = waiting(hosts)
    assert third.measured_by == {hosts.key("a"), hosts.key("b")}
    assert [next_for(hosts, name) for name in "abc"] == [None, None, third.id]

    plant_speeds(monkeypatch, repeat(1.3))
    assert run(hosts, "c", third).state is JobState.DONE

    assert ask(hosts).verdict.decision is Decision.TUNED
    assert any("the 3 hosts disagree" in step for step in ask(hosts).explain)
    assert waiting(hosts) == []


@pytest.mark.proof
def test_nobody_is_asked_where_two_disagree_and_there_is_no_third(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(1.3))
    run(hosts, "a", ask_for(hosts.jobs("service")))
    [second] = waiting(hosts)
    plant_speeds(monkeypatch, repeat(0.8))

    run(hosts, "b", second)

    assert waiting(hosts) == []
    again = ask_for(hosts.jobs("service"))
    assert again.measured_by == frozenset(), "nobody could take it"
    assert run(hosts, "a", again).state is JobState.DONE


@pytest.mark.proof
def test_two_hosts_that_searched_before_the_quorum_come_to_agree(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.forget_all()
    hosts("service").require_quorum(1)
    plant_speeds(monkeypatch, repeat(1.3))
    run(hosts, "a", ask_for(hosts.jobs("a")))
    [of_a] = {t.artifact for t in hosts("a").trials(problem=PROBLEM) if t.stage is Stage.CONFIRM}
    plant_speeds_of(monkeypatch, lambda build: 1.1 if build.artifact == of_a else 1.3)
    run(hosts, "b", ask_for(hosts.jobs("b")))
    hosts.believe_all()
    hosts("service").require_quorum(2)
    assert len({one.kernel for one in ask(hosts).verdict.hosts}) == 2
    job = ask_for(hosts.jobs("service"))
    [other] = [name for name in "ab" if hosts.key(name) not in job.measured_by]

    plant_speeds(monkeypatch, repeat(1.3))
    assert run(hosts, other, job).state is JobState.DONE

    verdict = ask(hosts).verdict
    assert (verdict.decision, verdict.artifact is not None) == (Decision.TUNED, True)
    assert waiting(hosts) == []


@pytest.mark.proof
def test_what_no_host_would_serve_needs_no_other(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(0.5))

    run(hosts, "a", ask_for(hosts.jobs("service")))

    assert ask(hosts).verdict.decision is Decision.BASELINE
    assert waiting(hosts) == []


@pytest.mark.proof
def test_hosts_that_do_not_believe_each_other_do_not_ask_in_turn_for_ever(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.forget_all()
    plant_speeds(monkeypatch, repeat(1.3))
    run(hosts, "a", ask_for(hosts.jobs("service")))
    [second] = waiting(hosts)

    run(hosts, "b", second)

    assert waiting(hosts) == []
