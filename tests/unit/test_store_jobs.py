"""Jobs are made once, are run by one worker at a time, and outlive it."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from queueing import CLASS, LEASE_S, NOW, ask, at, claim, claim_if_any, problem
from samples import CPU, PROBLEM
from sqlalchemy import Engine, update

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.job import Job, JobProgress, JobState
from gemm_tuner.errors import GemmTunerError, InvalidProblem, InvalidSetting
from gemm_tuner.store.jobs import jobs as store_jobs
from gemm_tuner.store.jobs.jobs import Jobs, JobsFull
from gemm_tuner.store.sql.tables import jobs as rows


@pytest.fixture
def jobs(engine: Engine) -> Jobs:
    return Jobs(engine)


def test_a_job_is_what_was_asked_for(jobs: Jobs) -> None:
    context = ExecutionContext(threads=2, regime=Regime.COLD_WEIGHTS)

    job, is_new = ask(jobs, context=context, budget_s=12, priority=5)

    assert is_new
    assert (job.problem, job.class_key, job.context) == (PROBLEM, CLASS, context)
    assert (job.budget_s, job.priority, job.owner) == (12.0, 5, "me")
    assert (job.state, job.attempts, job.progress) == (JobState.WAITING, 0, JobProgress())
    assert (job.created_at, job.changed_at) == (NOW, NOW)
    assert len(bytes.fromhex(job.id)) == 16
    assert jobs.get(job.id) == job
    assert jobs.get("0" * 32) is None


def test_the_same_question_in_flight_is_the_same_job(jobs: Jobs) -> None:
    first, _new = ask(jobs)

    again, is_new = ask(jobs, owner="another", priority=7, budget_s=5.0)
    lower, _new = ask(jobs, priority=-3)

    assert (again.id, is_new) == (first.id, False)
    assert (again.priority, lower.priority) == (7, 7)
    assert again.revision > first.revision
    assert lower == again


@pytest.mark.parametrize(
    "change",
    [
        {"class_key": "other"},
        {"context": ExecutionContext(threads=2)},
        {"context": ExecutionContext(regime=Regime.COLD_WEIGHTS)},
    ],
)
def test_another_question_is_another_job(jobs: Jobs, change: dict[str, object]) -> None:
    first, _new = ask(jobs)

    other, is_new = ask(jobs, **change)

    assert is_new
    assert other.id != first.id


def test_a_job_that_is_over_is_not_the_answer_to_a_new_question(jobs: Jobs) -> None:
    first, _new = ask(jobs)
    jobs.cancel(first.id, at(1))

    second, is_new = ask(jobs)

    assert is_new
    assert second.id != first.id


def test_a_job_that_is_about_to_be_cancelled_is_nobody_elses(jobs: Jobs) -> None:
    first, _new = ask(jobs)
    claim(jobs)
    jobs.cancel(first.id, at(1))

    second, is_new = ask(jobs)

    assert is_new
    assert second.id != first.id


def test_a_key_names_its_job_even_when_that_is_over(jobs: Jobs) -> None:
    first, _new = ask(jobs, idempotency_key="a")
    jobs.cancel(first.id, at(1))

    again, is_new = ask(jobs, idempotency_key="a")

    assert (again.id, is_new, again.state) == (first.id, False, JobState.CANCELLED)
    assert ask(jobs, idempotency_key="b")[1]
    assert ask(jobs, problem(8), owner="another", idempotency_key="a")[1]


def test_a_key_that_joined_a_job_of_another_names_it_for_ever(jobs: Jobs) -> None:
    first, _new = ask(jobs, owner="another")
    joined, _new = ask(jobs, idempotency_key="a")
    jobs.cancel(first.id, at(1))

    again, is_new = ask(jobs, idempotency_key="a")

    assert (joined.id, again.id, is_new) == (first.id, first.id, False)


@pytest.mark.parametrize("change", [{"budget_s": 31.0}, {"priority": 1}, {"class_key": "x"}])
def test_a_key_with_another_question_is_refused(jobs: Jobs, change: dict[str, object]) -> None:
    ask(jobs, idempotency_key="a")

    with pytest.raises(InvalidSetting, match="'a' was used for another question; use a new key"):
        ask(jobs, idempotency_key="a", **change)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"budget_s": 0}, "budget 0 s cannot be used"),
        ({"budget_s": float("nan")}, "budget nan s cannot be used"),
        ({"budget_s": 3601}, "at most 3600 s"),
        ({"priority": 101}, "use -100 to 100"),
        ({"owner": ""}, "owner '' cannot be used"),
        ({"owner": "x" * 65}, "1 to 64 letters"),
        ({"idempotency_key": ""}, "idempotency key '' cannot be used"),
        ({"idempotency_key": "é"}, "printable letters of ASCII"),
        ({"idempotency_key": "x" * 256}, "1 to 255"),
    ],
)
def test_what_cannot_be_used_is_refused(jobs: Jobs, change: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidSetting, match=told):
        ask(jobs, **change)

    assert jobs.newest(10) == ()


def test_a_problem_without_work_is_refused(jobs: Jobs) -> None:
    with pytest.raises(InvalidProblem, match="multiplies nothing"):
        ask(jobs, problem(0))


def test_no_more_jobs_are_taken_than_fit(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_jobs, "MAX_IN_FLIGHT", 3)
    monkeypatch.setattr(store_jobs, "MAX_IN_FLIGHT_OF_OWNER", 2)
    ask(jobs, problem(1))
    second, _new = ask(jobs, problem(2))

    with pytest.raises(JobsFull, match="2 jobs of me wait or run already"):
        ask(jobs, problem(3))
    ask(jobs, problem(3), owner="another")
    with pytest.raises(JobsFull, match="3 jobs wait or run already"):
        ask(jobs, problem(4), owner="a third")

    assert ask(jobs, problem(1)) == (jobs.newest(3)[2], False)
    jobs.cancel(second.id, at(1))
    assert ask(jobs, problem(4))[1]


def test_no_more_keys_are_kept_than_fit(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_jobs, "MAX_KEYS_OF_OWNER", 1)
    ask(jobs, idempotency_key="a")

    with pytest.raises(JobsFull, match="me used 1 idempotency keys"):
        ask(jobs, problem(2), idempotency_key="b")

    assert len(jobs.newest(10)) == 1, "the job of a key that is refused is not made"


def test_old_jobs_make_room_for_new_ones(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_jobs, "MAX_KEPT", 2)
    waiting, _new = ask(jobs)
    for m in range(1, 6):
        jobs.cancel(ask(jobs, problem(m), idempotency_key=str(m))[0].id, NOW)

    kept = jobs.newest(10)

    assert [job.problem for job in kept] == [problem(5), problem(4), waiting.problem]
    assert ask(jobs, problem(1), idempotency_key="1")[1], "its key went with it"


def test_the_newest_come_first_and_may_be_of_one_state(jobs: Jobs) -> None:
    ids = [ask(jobs, problem(m))[0].id for m in range(1, 5)]
    jobs.cancel(ids[1], at(1))

    assert [job.id for job in jobs.newest(3)] == ids[:0:-1]
    assert [job.id for job in jobs.newest(9, state=JobState.CANCELLED)] == [ids[1]]


def test_the_greatest_priority_is_run_first_then_the_oldest(jobs: Jobs) -> None:
    for m, priority in ((1, 0), (2, 5), (3, 5), (4, -1)):
        ask(jobs, problem(m), priority=priority, context=ExecutionContext(threads=m))

    looked, taken = [], []
    while (threads := jobs.next_threads([CLASS], NOW)) is not None:
        looked.append(threads)
        taken.append(claim(jobs).problem.m.low)

    assert taken == [2, 3, 1, 4]
    assert looked == taken
    assert claim_if_any(jobs) is None


def test_a_job_is_run_on_its_class_of_cpus(jobs: Jobs) -> None:
    job, _new = ask(jobs)

    assert claim_if_any(jobs, class_key="another") is None
    assert jobs.claim("one", class_keys=[], now=NOW, lease_s=LEASE_S) is None
    claimed = jobs.claim("one", class_keys=["another", CLASS], now=NOW, lease_s=LEASE_S)
    assert claimed is not None
    assert (claimed.id, claimed.state, claimed.worker) == (job.id, JobState.RUNNING, "one")


def test_a_report_is_kept_and_renews_the_lease(jobs: Jobs) -> None:
    job, _new = ask(jobs)
    begun = claim(jobs)
    told = JobProgress(tried=9, failed=2, best_ns=1.5, over_baseline=1.25, seconds_left=20.0)

    assert jobs.report(job.id, "one", told, at(50), LEASE_S)

    found = jobs.get(job.id)
    assert found is not None
    assert (found.progress, found.changed_at) == (told, at(50))
    assert found.revision > begun.revision > job.revision
    assert claim_if_any(jobs, "two", seconds=100) is None
    assert claim(jobs, "two", seconds=111).id == job.id


def test_a_job_whose_worker_was_lost_goes_to_another(jobs: Jobs) -> None:
    job, _new = ask(jobs)
    claim(jobs)
    assert claim_if_any(jobs, "two", seconds=LEASE_S - 1) is None
    assert jobs.next_threads([CLASS], at(LEASE_S - 1)) is None

    threads = jobs.next_threads([CLASS], at(LEASE_S + 1))
    again = claim(jobs, "two", seconds=LEASE_S + 1)

    assert threads == 1
    assert (again.id, again.worker, again.attempts) == (job.id, "two", 2)
    assert not jobs.report(job.id, "one", JobProgress(), at(70), LEASE_S)
    assert jobs.finish(job.id, "one", JobState.DONE, "late", at(70)) is None
    assert jobs.release(job.id, "one", at(70)) is None
    assert jobs.put_back(job.id, "one", "late", at(70)) is None
    assert jobs.get(job.id) == again


def test_what_a_clock_wrote_that_was_ahead_holds_no_job(jobs: Jobs) -> None:
    job, _new = ask(jobs)
    claim(jobs, seconds=86_400)
    jobs.see_worker("one", class_key=CLASS, cpu_key=CPU.exact_key, now=at(86_400))
    assert (jobs.has_worker(CLASS, at(1)), jobs.next_threads([CLASS], at(1))) == (False, 1)
    assert claim(jobs, "two", seconds=1).id == job.id
    assert claim_if_any(jobs, "three", seconds=-30) is None, "clocks differ by seconds"


def test_a_job_that_lost_three_workers_has_failed(jobs: Jobs) -> None:
    job, _new = ask(jobs)
    for attempt in range(3):
        claim(jobs, seconds=attempt * (LEASE_S + 1))

    assert claim_if_any(jobs, seconds=3 * (LEASE_S + 1)) is None

    found = jobs.get(job.id)
    assert found
    assert (found.state, found.attempts, found.worker) == (JobState.FAILED, 3, None)
    assert "its worker was lost" in found.detail


def test_what_came_out_is_kept(jobs: Jobs) -> None:
    job, _new = ask(jobs)
    claim(jobs)

    finished = jobs.finish(job.id, "one", JobState.DONE, "tuned: 1.31 times onednn", at(9))

    assert finished is not None
    assert (finished.state, finished.state.is_over) == (JobState.DONE, True)
    assert (finished.detail, finished.changed_at) == ("tuned: 1.31 times onednn", at(9))
    assert not jobs.report(job.id, "one", JobProgress(), at(10), LEASE_S)
    assert jobs.finish(job.id, "one", JobState.FAILED, "", at(10)) is None
    assert jobs.cancel(job.id, at(10)) == finished
    assert claim_if_any(jobs, seconds=1000) is None


def test_a_stopped_worker_gives_its_job_back(jobs: Jobs) -> None:
    job, _new = ask(jobs)
    for _attempt in range(9):
        claim(jobs)
        released = jobs.release(job.id, "one", at(1))

    assert released is not None
    assert (released.state, released.attempts, released.worker) == (JobState.WAITING, 0, None)


def test_a_job_that_is_put_back_three_times_has_failed(jobs: Jobs) -> None:
    ask(jobs)
    states = []
    for _attempt in range(3):
        again = jobs.put_back(claim(jobs).id, "one", "no \0 nor \udcff", at(1))
        assert again
        assert again.detail == "no \\x00 nor \\udcff", "in characters that databases take"
        states.append(again.state)

    assert states == [JobState.WAITING, JobState.WAITING, JobState.FAILED]


def test_a_job_that_waits_is_cancelled_at_once(jobs: Jobs) -> None:
    job, _new = ask(jobs)

    cancelled = jobs.cancel(job.id, at(1))

    assert cancelled is not None
    assert cancelled.state is JobState.CANCELLED
    assert cancelled.detail == "cancelled before anything was tried"
    assert claim_if_any(jobs) is None
    assert jobs.cancel("0" * 32, at(1)) is None


def test_what_was_tried_of_a_job_is_kept_when_it_is_cancelled(jobs: Jobs) -> None:
    endings: list[Callable[[str], Job | None]] = [
        lambda key: jobs.release(key, "one", at(2)),
        lambda key: jobs.put_back(key, "one", "why", at(2)),
        jobs.get,  # its worker is lost
    ]
    for m, end in enumerate(endings, start=1):
        job, _new = ask(jobs, problem(m))
        claim(jobs)
        end(job.id)

        cancelled = jobs.cancel(job.id, at(LEASE_S + 2))

        assert cancelled is not None
        assert cancelled.detail == (
            "cancelled before the best was confirmed; what was tried is kept"
        )


def test_the_worker_of_a_running_job_hears_that_it_is_cancelled(jobs: Jobs) -> None:
    job, _new = ask(jobs)
    claim(jobs)

    asked = jobs.cancel(job.id, at(1))
    again = jobs.cancel(job.id, at(2))

    assert asked is not None
    assert (asked.state, asked.is_cancel_asked) == (JobState.RUNNING, True)
    assert again == asked
    assert not jobs.report(job.id, "one", JobProgress(tried=3), at(50), LEASE_S)
    assert claim_if_any(jobs, "two", seconds=LEASE_S + 1) is None, "it still holds its job"
    ended = jobs.finish(job.id, "one", JobState.CANCELLED, "tuned: 1.1 times", at(70))
    assert ended is not None
    assert (ended.state, ended.progress.tried) == (JobState.CANCELLED, 3)


def test_a_cancelled_job_whose_worker_is_lost_or_stopped_is_over(jobs: Jobs) -> None:
    endings: list[Callable[[str], Job | None]] = [
        lambda key: jobs.release(key, "one", at(2)),
        lambda key: jobs.put_back(key, "one", "why", at(2)),
        lambda key: jobs.cancel(key, at(LEASE_S + 1)),
        lambda key: claim_if_any(jobs, "two", seconds=LEASE_S + 1) or jobs.get(key),
    ]
    for m, end in enumerate(endings, start=1):
        job, _new = ask(jobs, problem(m))
        claim(jobs)
        jobs.cancel(job.id, at(1))

        ended = end(job.id)

        assert ended is not None
        assert (ended.id, ended.state) == (job.id, JobState.CANCELLED)
        assert ended.detail


def test_what_is_over_for_long_is_forgotten_with_its_key(jobs: Jobs) -> None:
    old, _new = ask(jobs, problem(1), idempotency_key="a")
    jobs.cancel(old.id, at(1))
    recent, _new = ask(jobs, problem(2))
    jobs.cancel(recent.id, at(100))
    waiting, _new = ask(jobs, problem(3))

    assert jobs.forget_over(at(50)) == 1

    assert {job.id for job in jobs.newest(10)} == {recent.id, waiting.id}
    assert ask(jobs, problem(4), idempotency_key="a")[1]


def test_a_worker_is_there_while_it_is_heard_of(jobs: Jobs) -> None:
    for seconds in (0, 30):
        jobs.see_worker("one", class_key=CLASS, cpu_key=CPU.exact_key, now=at(seconds))

    assert jobs.has_worker(CLASS, at(89))
    assert not jobs.has_worker(CLASS, at(91))
    assert not jobs.has_worker("another", at(31))
    jobs.forget_worker("one")
    assert not jobs.has_worker(CLASS, at(31))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"problem": "f32 1x1x1 nk none"}, "it was damaged"),
        ({"regime": "lukewarm"}, "did not store"),
        ({"budget_s": -1.0}, "budget -1 s cannot be used"),
    ],
)
def test_a_damaged_job_keeps_no_other_from_being_run(
    jobs: Jobs, engine: Engine, change: dict[str, object], told: str
) -> None:
    damaged, _new = ask(jobs, problem(1), priority=9)
    whole, _new = ask(jobs, problem(2))
    with engine.begin() as connection:
        is_it = rows.c.id == damaged.id
        connection.execute(update(rows).where(is_it).values(change))

    with pytest.raises(GemmTunerError, match=told):
        jobs.get(damaged.id)
    assert [job.id for job in jobs.newest(9)] == [whole.id]
    assert claim(jobs).id == whole.id
    assert claim_if_any(jobs) is None


@pytest.mark.parametrize("is_running", [False, True])
def test_a_damaged_job_is_asked_for_anew_and_holds_up_no_worker(
    jobs: Jobs, engine: Engine, *, is_running: bool
) -> None:
    damaged, _new = ask(jobs)
    if is_running:
        claim(jobs)
    with engine.begin() as connection:
        connection.execute(update(rows).values(budget_s=-1.0))
    if is_running:
        assert jobs.finish(damaged.id, "one", JobState.DONE, "tuned", at(1)) is None
        assert not jobs.is_held(damaged.id, "one")

    again, is_new = ask(jobs)

    assert is_new
    assert again.id != damaged.id
    assert claim(jobs, "two").id == again.id


def test_threads_never_get_the_same_job(jobs: Jobs) -> None:
    wanted = {ask(jobs, problem(m))[0].id for m in range(1, 41)}

    def take_all(worker: int) -> list[str]:
        taken = []
        while (job := claim_if_any(jobs, f"worker {worker}")) is not None:
            taken.append(job.id)
        return taken

    with ThreadPoolExecutor(max_workers=4) as executor:
        taken = Counter(key for found in executor.map(take_all, range(4)) for key in found)

    assert taken == Counter(wanted)


def test_threads_that_ask_the_same_get_one_job(jobs: Jobs) -> None:
    with ThreadPoolExecutor(max_workers=4) as executor:
        found = list(executor.map(lambda _number: ask(jobs), range(20)))

    assert len({job.id for job, _new in found}) == 1
    assert sum(is_new for _job, is_new in found) == 1


_CLAIMING = """
import sys
from datetime import UTC, datetime
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.jobs.jobs import Jobs

jobs = Jobs(open_database(sys.argv[1]))
sys.stdin.readline()
while True:
    job = jobs.claim(
        sys.argv[2], class_keys=[sys.argv[3]], now=datetime.now(UTC), lease_s=60
    )
    if job is None:
        break
    print(job.id)
"""


@pytest.mark.proof
def test_processes_never_get_the_same_job(jobs: Jobs, database_url: str, tmp_path: Path) -> None:
    wanted = {ask(jobs, problem(m))[0].id for m in range(1, 41)}

    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CLAIMING, database_url, f"worker {number}", CLASS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for number in range(3)
    ]
    told = [process.communicate("begin\n", timeout=120)[0].split() for process in processes]

    assert Counter(key for found in told for key in found) == Counter(wanted)
