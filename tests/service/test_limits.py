"""Callers who are slow, many or without end, each of whom must not cost the others an answer."""

import asyncio
import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from http import HTTPStatus
from io import StringIO

import httpx
import pytest
from gemm_tuner_service.logs import BURST, MAX_RECORD_CHARACTERS, BoundedHandler
from gemm_tuner_service.middleware.limits import RequestLimits
from gemm_tuner_service.server.connections import ConnectionLimits
from gemm_tuner_service.server.listening import listen_on_port
from gemm_tuner_service.settings import Settings
from samples import PROBLEM
from serving import served
from starlette.types import Message, Receive, Scope, Send

from gemm_tuner.domain.access import TokenSecret

HURRIED = ConnectionLimits(
    head_s=0.3, body_s=0.3, answer_s=0.5, idle_s=1, connections=24, backlog=4
)
PATIENCE_S = 20
# Of those who are to be answered, on a busy machine too.
UNHURRIED = replace(HURRIED, head_s=PATIENCE_S, body_s=PATIENCE_S, answer_s=PATIENCE_S)
MAX_BUFFERED_BYTES = 2**24  # by the sockets of both sides
HEAD = b"POST /v1/resolve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"


@pytest.fixture
def hurried(settings: Settings) -> Iterator[httpx.Client]:
    """Yield a client of a service with short deadlines and few connections."""
    with served(settings, HURRIED) as client:
        yield client


@pytest.fixture
def unhurried(settings: Settings) -> Iterator[httpx.Client]:
    """Yield a client of a service that waits for requests, and closes what idles after them."""
    with served(settings, UNHURRIED) as client:
        yield client


def connect(client: httpx.Client) -> socket.socket:
    url = client.base_url
    return socket.create_connection((url.host, url.port or 0), timeout=PATIENCE_S)


def read_to_end(connection: socket.socket) -> bytes:
    """Return what comes until the service closes the connection."""
    content = b""
    try:
        while chunk := connection.recv(65536):
            content += chunk
    except ConnectionResetError:
        pass
    return content


@pytest.mark.parametrize(
    "sent", [b"", b"GET /he", HEAD, HEAD + b"\r\n", HEAD + b"\r\n" + b"x" * 999]
)
def test_a_request_that_is_not_finished_is_closed(hurried: httpx.Client, sent: bytes) -> None:
    with connect(hurried) as connection:
        connection.sendall(sent)

        assert read_to_end(connection) == b""


CHUNKED = HEAD.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked")
BOTH_ENDS = (
    CHUNKED + b"Content-Length: 12\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
)
LONG = b"x" * (HURRIED.head_bytes + 1)
ASK = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        *BOTH_ENDS,  # a proxy may believe the other, and take what follows for another request
        HEAD + b"Content-Length: 2\r\n\r\n{}",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: y\r\n\r\n",
        bytes(range(256)),
    ],
)
def test_what_is_no_request_is_refused(unhurried: httpx.Client, sent: bytes) -> None:
    with connect(unhurried) as connection:
        half = len(sent) // 2  # an error may show in the first part, and end the connection
        with suppress(ConnectionError):
            connection.sendall(sent[:half])
            connection.sendall(sent[half:])
        answer = read_to_end(connection)

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"content-type: application/problem+json" in head
    assert json.loads(body)["type"] == "urn:gemm-tuner:problem:bad-request"


@pytest.mark.parametrize("path", [b"/v1/nothing", b"/v1/records"])
@pytest.mark.parametrize("sent", BOTH_ENDS)
def test_a_refused_request_with_two_ends_is_the_last_of_its_connection(
    unhurried: httpx.Client, path: bytes, sent: bytes
) -> None:
    with connect(unhurried) as connection:
        connection.sendall(sent.replace(b"/v1/resolve", path) + ASK)
        answer = read_to_end(connection)

    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /",
        HEAD + b"X-Long: ",
        CHUNKED + b"\r\n2;",
        CHUNKED + b"\r\n2\r\n{}\r\n0\r\nX-Long: ",
    ],
)
def test_a_line_without_end_is_not_read_on(unhurried: httpx.Client, begin: bytes) -> None:
    sent_bytes = 0
    with connect(unhurried) as connection, suppress(ConnectionError):
        connection.sendall(begin)
        while True:
            connection.sendall(LONG)
            sent_bytes += len(LONG)

    assert sent_bytes < MAX_BUFFERED_BYTES


def test_requests_in_one_piece_are_answered_in_order(unhurried: httpx.Client) -> None:
    paths = [b"/healthz", b"/version", b"/absent"] * 10
    requests = [b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in paths]
    with connect(unhurried) as connection:
        connection.sendall(b"".join(requests) + b"BAD\0\r\n\r\n")
        answer = read_to_end(connection)

    statuses = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"404"] * 10 + [b"400"]


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_an_upgrade_is_not_made_and_the_body_is_read(
    unhurried: httpx.Client, upgrade: bytes
) -> None:
    body = json.dumps({"problem": PROBLEM.text}).encode()
    head = (
        b"POST /v1/resolve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: Upgrade\r\nUpgrade: %b\r\nContent-Length: %d\r\n\r\n"
    )
    with connect(unhurried) as connection:
        connection.sendall(head % (upgrade, len(body)))
        time.sleep(0.05)
        connection.sendall(body)
        answer = read_to_end(connection)

    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1
    assert b'"decision":"tuned"' in answer


def test_who_sends_no_more_is_still_answered(unhurried: httpx.Client) -> None:
    body = json.dumps({"problem": PROBLEM.text, "threads": 1}).encode()
    head = b"POST /v1/resolve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ask in range(5):
        with connect(unhurried) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            connection.shutdown(socket.SHUT_WR)
            answer = read_to_end(connection)
        assert answer.startswith(b"HTTP/1.1 200")


def test_a_trailer_is_no_header(unhurried: httpx.Client) -> None:
    body = json.dumps({"problem": PROBLEM.text}).encode()
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    json_head = CHUNKED + b"Content-Type: application/json\r\n\r\n"
    with connect(unhurried) as connection:
        connection.sendall(json_head + chunk + b"0\r\nX-Request-ID: mine\r\n\r\n")
        answer = read_to_end(connection)

    assert answer.startswith(b"HTTP/1.1 200")
    assert b"mine" not in answer


def test_a_byte_now_and_then_does_not_move_the_deadline(hurried: httpx.Client) -> None:
    with connect(hurried) as connection:
        connection.sendall(HEAD + b"X-Slow: ")
        connection.settimeout(0.05)
        begin_s = time.monotonic()
        content = None
        while content is None and time.monotonic() - begin_s < PATIENCE_S:
            try:
                connection.sendall(b"x")
                content = connection.recv(100)
            except TimeoutError:
                continue
            except OSError:
                content = b""

    assert content == b""


def test_a_kept_connection_has_the_same_deadlines(hurried: httpx.Client) -> None:
    with connect(hurried) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        content = connection.recv(65536)
        connection.sendall(b"GET /he")
        content += read_to_end(connection)

    assert content.startswith(b"HTTP/1.1 200")
    assert content.endswith(b'{"status":"ok"}')


@pytest.mark.proof
def test_more_idle_connections_than_the_bound_do_not_keep_others_out(
    hurried: httpx.Client,
) -> None:
    with ExitStack() as stack:
        for _number in range(4 * HURRIED.connections):
            connection = stack.enter_context(connect(hurried))
            connection.sendall(HEAD)
        health = hurried.get("/healthz")
        answer = hurried.post("/v1/resolve", json={"problem": PROBLEM.text})

    assert health.status_code == HTTPStatus.OK
    assert answer.json()["verdict"]["decision"] == "tuned"


def test_answers_on_a_kept_connection_are_sent_at_once() -> None:
    with listen_on_port("127.0.0.1", 0) as listener:
        with socket.create_connection(listener.getsockname()):
            accepted, _address = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_connections_are_fewer_than_the_file_descriptors_allow() -> None:
    for descriptors in (64, 256, 1024, 10**6):
        limits = ConnectionLimits().within(descriptors)

        assert limits.backlog >= 1
        assert 1 <= limits.connections + 4 * limits.backlog < descriptors


class Callers:
    """Requests with bodies of which a part has come, and what they were answered."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.statuses: dict[str, int] = {}

    async def begin(
        self, name: str, body: bytes, *, is_whole: bool, path: str = "/"
    ) -> "asyncio.Task[None]":
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": not is_whole}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.statuses[name] = message["status"]

        scope: Scope = {
            "type": "http",
            "path": path,
            "headers": [(b"content-length", b"9999")],
        }
        task = asyncio.create_task(self._limits(scope, receive, send))
        for _turn in range(4):
            await asyncio.sleep(0)
        return task


async def accept(_scope: Scope, receive: Receive, send: Send) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def test_the_oldest_unfinished_body_gives_way() -> None:
    async def attack() -> dict[str, int]:
        callers = Callers(RequestLimits(accept, max_unfinished_bytes=1000))
        tasks = [await callers.begin(f"{n}", b"x" * 400, is_whole=False) for n in range(4)]
        await (await callers.begin("honest", b"x" * 300, is_whole=True))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return callers.statuses

    assert asyncio.run(attack()) == {"0": 503, "1": 503, "2": 503, "honest": 200}


def test_only_so_many_requests_are_answered_at_once() -> None:
    async def wait(_scope: Scope, _receive: Receive, _send: Send) -> None:
        await asyncio.get_running_loop().create_future()

    async def attack() -> dict[str, int]:
        callers = Callers(RequestLimits(wait, max_requests=2))
        tasks = [await callers.begin(f"{n}", b"", is_whole=True) for n in range(3)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return callers.statuses

    assert asyncio.run(attack()) == {"2": 503}


def test_whether_the_service_lives_is_answered_however_busy_it_is() -> None:
    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/healthz":
            await asyncio.get_running_loop().create_future()
        await accept(scope, receive, send)

    async def attack() -> dict[str, int]:
        callers = Callers(RequestLimits(wait, max_requests=1))
        task = await callers.begin("busy", b"", is_whole=True)
        await (await callers.begin("healthz", b"", is_whole=True, path="/healthz"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return callers.statuses

    assert asyncio.run(attack()) == {"healthz": 200}


def test_a_log_is_bounded_and_says_what_was_left_out() -> None:
    now_s = 0.0
    stream = StringIO()
    handler = BoundedHandler(stream, now_s=lambda: now_s)
    record = logging.makeLogRecord({"msg": "x" * 10_000})

    for _number in range(100_000):
        handler.handle(record)
    assert stream.getvalue().count("\n") == BURST
    assert len(stream.getvalue()) < BURST * (MAX_RECORD_CHARACTERS + 100)

    now_s = 60.0
    handler.handle(logging.makeLogRecord({"msg": "later"}))
    assert stream.getvalue().endswith(f"({100_000 - BURST} messages were left out)\nlater\n")


def test_a_log_shows_what_callers_sent_without_tokens_and_controls() -> None:
    token = TokenSecret.generate().text
    stream = StringIO()
    handler = BoundedHandler(stream)

    handler.handle(logging.makeLogRecord({"msg": f"GET /\x1b[2J{token} failed"}))

    assert stream.getvalue() == "GET /\\x1b[2Jgt_… failed\n"


def test_the_handler_writes_to_standard_error_by_default() -> None:
    assert BoundedHandler().stream is sys.stderr
