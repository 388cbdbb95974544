"""The events of a job: each change once, an end, and a bound on who waits for them."""

import asyncio
import json
import socket
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from gemm_tuner_service.clients import client_limits
from gemm_tuner_service.jobs import job_watch
from gemm_tuner_service.jobs.job_watch import JobWatch
from gemm_tuner_service.routes import jobs as module
from gemm_tuner_service.server.connections import ConnectionLimits
from gemm_tuner_service.settings import Settings
from job_site import JobSite
from samples import CONTEXT, CPU, PROBLEM
from serving import served
from sqlalchemy import Engine, literal, literal_column, update

from gemm_tuner.domain.access import Scope
from gemm_tuner.domain.job import Job, JobState
from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.sql.tables import jobs as rows

SAMPLE = Job(
    id="a" * 32,
    problem=PROBLEM,
    class_key=CPU.class_key,
    context=CONTEXT,
    budget_s=1.0,
    priority=0,
    state=JobState.RUNNING,
    owner="test",
    created_at=datetime.now(UTC),
    changed_at=datetime.now(UTC),
)
_MANY = httpx.Limits(max_connections=400)
WITHIN_S = 20.0
BRIEF = ConnectionLimits(answer_s=4.0)  # a busy machine answers within that


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a stream."""

    name: str
    id: int
    data: dict[str, Any]


@pytest.fixture
def site(settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobSite]:
    monkeypatch.setattr(job_watch, "POLL_S", 0.02)
    with served(settings) as client:
        yield JobSite(client, engine)


@pytest.fixture
def brief_site(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[JobSite]:
    """Yield a service whose answers may take less time than usual."""
    monkeypatch.setattr(job_watch, "POLL_S", 0.02)
    with served(settings, BRIEF) as client:
        yield JobSite(client, engine)


def read(lines: Iterator[str]) -> Iterator[Event]:
    """Yield the events in the lines of a stream."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield Event(fields["event"], int(fields["id"]), json.loads(fields["data"]))
            fields = {}


def open_stream(stack: ExitStack, site: JobSite, path: str, **headers: str) -> Iterator[str]:
    """Return the lines of a stream of events."""
    answer = stack.enter_context(
        site.client.stream("GET", path, headers={**site.tuner, **headers}, timeout=WITHIN_S)
    )
    assert answer.status_code == 200, answer.read()
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    lines: Iterator[str] = answer.iter_lines()
    return lines


def test_each_change_is_an_event_and_the_end_is_the_last(site: JobSite) -> None:
    job = site.submit()
    with ExitStack() as stack:
        events = read(open_stream(stack, site, f"{job['url']}/events"))
        waiting = next(events)
        claimed = site.claim()
        running = next(events)
        site.report(claimed, tried=5, failed=1, best_ns=700.0, over_baseline=1.4, seconds_left=9.0)
        told = next(events)
        site.finish(claimed, detail="tuned: 1.4 times onednn")
        rest = list(events)

    assert (waiting.name, waiting.id, waiting.data["state"]) == ("progress", 1, "waiting")
    assert running.data["state"] == "running"
    assert told.data["progress"] == {
        "tried": 5, "failed": 1, "best_ns": 700.0, "over_baseline": 1.4, "seconds_left": 9.0
    }  # fmt: skip
    assert [each.name for each in rest] == ["end"]
    assert rest[0].data["detail"] == "tuned: 1.4 times onednn"
    assert waiting.id < running.id < told.id < rest[0].id


@pytest.mark.parametrize("is_text", [True, False])
def test_a_damaged_job_is_told_to_its_own_followers_alone(
    site: JobSite, caplog: pytest.LogCaptureFixture, *, is_text: bool
) -> None:
    """A text that is none, which SQLite may hold, spoils each query that reads it."""
    is_none = not is_text and site.engine.dialect.name == "sqlite"
    damage = literal_column("CAST(x'ff80' AS TEXT)") if is_none else literal(-1.0)
    damaged, whole = site.submit(), site.submit(threads=2)
    paths = [f"{one['url']}/events" for one in (damaged, damaged, whole)]
    with ExitStack() as stack:
        streams = [open_stream(stack, site, path) for path in paths]
        waiting = stack.enter_context(ThreadPoolExecutor()).submit(site.resolve, "?wait=60s")
        assert [next(read(lines)).name for lines in streams] == ["progress"] * 3
        with site.engine.begin() as connection:
            is_it = rows.c.id == damaged["id"]
            connection.execute(update(rows).where(is_it).values(budget_s=damage))
        told = ["\n".join(lines) for lines in streams[:2]]
        site.finish(site.claim())
        ends = [each.name for each in read(streams[2])]

    assert ends[-1] == "end"
    for text in told:
        assert "event: problem\ndata: {" in text
        assert "urn:gemm-tuner:problem:store-failed" in text
        assert "event: end" not in text
    answer = waiting.result(timeout=WITHIN_S)
    assert (answer.status_code, "damaged" in answer.json()["detail"]) == (503, True)
    assert caplog.text.count(f"job {damaged['id']} is followed no more") == 1
    listed = site.client.get("/v1/jobs", headers=site.tuner).json()["jobs"]
    assert [one["id"] for one in listed] == [whole["id"]]


def test_a_stream_outlasts_the_deadline_of_other_answers(
    brief_site: JobSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.2)
    job = brief_site.submit()

    with ExitStack() as stack:
        begin_s = time.monotonic()
        lines = open_stream(stack, brief_site, f"{job['url']}/events")
        beats = 0
        while time.monotonic() - begin_s < BRIEF.answer_s + 0.5:
            beats += next(lines).startswith(":")
        most = (time.monotonic() - begin_s) / module.HEARTBEAT_S + 1
        brief_site.finish(brief_site.claim())
        assert [each.name for each in read(lines)][-1] == "end"

    assert 5 < beats <= most


def test_a_stream_ends_when_its_time_is_up(site: JobSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STREAM_S", 0.3)
    job = site.submit()

    with ExitStack() as stack:
        events = list(read(open_stream(stack, site, f"{job['url']}/events")))

    assert [each.name for each in events] == ["progress"]


def test_what_the_caller_has_is_not_sent_again(site: JobSite) -> None:
    path = f"{site.submit()['url']}/events"
    claimed = site.claim()
    revision = site.jobs.newest(1)[0].revision

    with ExitStack() as stack:
        events = read(open_stream(stack, site, path, **{"Last-Event-ID": str(revision)}))
        site.finish(claimed)
        assert [each.name for each in events] == ["end"]


@pytest.mark.parametrize("last", ["", "x", "-1", "1.5", "9" * 18, "9" * 5000, "\xb2", "0"])
def test_an_id_of_no_event_counts_as_none(site: JobSite, last: str) -> None:
    path = f"{site.submit()['url']}/events"
    site.finish(site.claim())
    headers = [(b"Last-Event-ID", last.encode("latin-1")), *_raw(site.tuner)]

    answer = site.client.get(path, headers=headers)

    assert answer.status_code == 200
    assert [each.name for each in read(iter(answer.text.splitlines()))] == ["end"]


def test_a_caller_who_was_told_the_end_is_not_to_ask_again(site: JobSite) -> None:
    path = f"{site.submit()['url']}/events"
    site.finish(site.claim())
    (end,) = read(iter(site.client.get(path, headers=site.tuner).text.splitlines()))

    again = site.client.get(path, headers={**site.tuner, "Last-Event-ID": str(end.id)})

    assert (again.status_code, again.content) == (204, b"")


def test_head_does_not_wait(site: JobSite) -> None:
    answer = site.client.head(f"{site.submit()['url']}/events", headers=site.tuner)

    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/event-stream")


def test_streams_are_bounded_for_each_client_and_keep_no_place(site: JobSite) -> None:
    path = f"{site.submit()['url']}/events"
    most = client_limits.MAX_WAITING_OF_CLIENT

    with ExitStack() as stack:
        for _stream in range(most):
            open_stream(stack, site, path)
        refused = site.client.get(path, headers=site.tuner)
        assert site.resolve("").is_success
        assert site.client.get(path.removesuffix("/events"), headers=site.tuner).is_success

    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) > 0
    assert _until_200(site, path, site.tuner)


@pytest.mark.proof
def test_hundreds_of_streams_of_many_clients_leave_room_for_others(site: JobSite) -> None:
    clients = [site.headers(Scope.TUNE) for _client in range(13)]
    path = f"{site.submit(clients[0])['url']}/events"
    for headers in clients:
        site.submit(headers)

    with ExitStack() as stack:
        pool = stack.enter_context(
            httpx.Client(base_url=site.client.base_url, limits=_MANY, timeout=60)
        )
        statuses = [
            stack.enter_context(pool.stream("GET", path, headers=headers)).status_code
            for headers in clients
            for _stream in range(20)
        ]
        assert site.resolve("").is_success

    assert statuses.count(200) == client_limits.MAX_WAITING
    assert set(statuses) == {200, 429, 503}


def test_all_who_wait_share_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_watch, "POLL_S", 0.01)
    followers, asked = [SAMPLE, SAMPLE, replace(SAMPLE, id="b" * 32)], []

    def look(ids: Collection[str]) -> dict[str, Job]:
        asked.append(sorted(ids))
        if len(asked) == 1:
            raise StoreFailed("the database does not answer.")
        return {one: replace(SAMPLE, id=one, revision=len(asked)) for one in ids}

    async def follow() -> list[int]:
        watch = JobWatch(look)
        woken = [asyncio.Event() for _follower in followers]
        with ExitStack() as stack:
            followed = [
                stack.enter_context(watch.follow(job, event.set))
                for job, event in zip(followers, woken, strict=True)
            ]
            async with asyncio.timeout(WITHIN_S):
                await asyncio.gather(*(event.wait() for event in woken))
            revisions = [one.job.revision for one in followed]
        before = len(asked)
        await asyncio.sleep(0.1)
        assert len(asked) <= before + 1
        return revisions

    assert asyncio.run(follow()) == [2, 2, 2]
    assert asked[:2] == [["a" * 32, "b" * 32]] * 2


def test_a_job_that_was_deleted_is_followed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_watch, "POLL_S", 0.01)

    async def follow() -> bool:
        woken = asyncio.Event()
        with JobWatch(lambda _ids: {}).follow(SAMPLE, woken.set) as followed:
            async with asyncio.timeout(WITHIN_S):
                await woken.wait()
            return followed.is_over

    assert asyncio.run(follow())


def test_a_caller_who_reads_nothing_is_closed_and_blocks_nobody(brief_site: JobSite) -> None:
    job = brief_site.submit()
    host, port = brief_site.client.base_url.host, brief_site.client.base_url.port
    assert port is not None
    with socket.create_connection((host, port)) as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        token = brief_site.tuner["Authorization"]
        head = f"GET {job['url']}/events HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\n\r\n"
        caller.sendall(head.encode())
        claimed = brief_site.claim()
        for tried in range(50):
            brief_site.report(claimed, tried=tried)
        assert brief_site.resolve("").is_success
    brief_site.finish(claimed)

    with ExitStack() as stack:
        events = list(read(open_stream(stack, brief_site, f"{job['url']}/events")))
    assert [each.name for each in events] == ["end"]


def test_streams_end_with_the_service(settings: Settings, engine: Engine) -> None:
    with ExitStack() as stack:
        with served(settings) as client:
            site = JobSite(
                stack.enter_context(httpx.Client(base_url=client.base_url, timeout=60)), engine
            )
            lines = open_stream(stack, site, f"{site.submit()['url']}/events")
            events = read(lines)
            assert next(events).name == "progress"
            begin_s = time.monotonic()
        stopped_s = time.monotonic() - begin_s
        rest = list(events)

    assert stopped_s < ConnectionLimits().leaving_s - 2
    assert not rest


def test_who_leaves_is_not_followed(site: JobSite) -> None:
    path = f"{site.submit()['url']}/events"

    for _time in range(3 * client_limits.MAX_WAITING_OF_CLIENT):
        assert _until_200(site, path, site.tuner)


def _until_200(site: JobSite, path: str, headers: dict[str, str]) -> bool:
    """Return whether a stream is soon given again: that a caller left is seen a moment later."""
    until_s = time.monotonic() + WITHIN_S
    while time.monotonic() < until_s:
        with site.client.stream("GET", path, headers=headers) as answer:
            if answer.status_code == 200:
                return True
    return False


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]
