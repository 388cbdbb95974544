"""Callers who read late or never, on transports that hold what was not read."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from gemm_tuner_service.middleware.limits import RequestLimits
from gemm_tuner_service.server.connections import (
    BoundedProtocol,
    ConnectionLimits,
    Connections,
    server_config,
)
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

HIGH_WATER = 2**16  # asyncio's
BAD_CHUNK = b" /100000 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"
SOCKET = SimpleNamespace(
    family=socket.AF_INET,
    getpeername=lambda: ("192.0.2.1", 1),
    getsockname=lambda: ("192.0.2.2", 80),
)

Found = TypeVar("Found")


class Pipe(asyncio.Transport):
    """The way to a caller who reads when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent = bytearray()
        self.is_aborted = False
        self.max_size = 2**18  # asyncio's
        self._is_closing = False
        self._is_full = False
        self.protocol: BoundedProtocol

    async def send(self, data: bytes) -> None:
        """Send what a caller sends, and let the service work."""
        self.protocol.data_received(data)
        await settle()

    async def read(self) -> bytes:
        """Read all that was answered, and let the service work."""
        content, self.unsent = bytes(self.unsent), bytearray()
        if self._is_full:
            self._is_full = False
            self.protocol.resume_writing()
        await settle()
        return content

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.unsent += data
        if len(self.unsent) > HIGH_WATER and not self._is_full:
            self._is_full = True
            self.protocol.pause_writing()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return SOCKET if name == "socket" else default

    def get_write_buffer_size(self) -> int:
        return len(self.unsent)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self.is_aborted = self._is_closing = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Swift(Pipe):
    """The way to a caller who has read before anything is held."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass


class Service:
    """An application behind bounded connections."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits | None = None) -> None:
        chosen = limits or ConnectionLimits()
        self._config = server_config(app, chosen, log_config=None)
        self._connections = Connections(chosen, None)
        self._state = ServerState()

    def connect(self, pipe: Pipe | None = None) -> Pipe:
        pipe = pipe or Pipe()
        protocol = self._connections(self._config, self._state, app_state={})
        assert isinstance(protocol, BoundedProtocol)
        pipe.protocol = protocol
        protocol.connection_made(pipe)
        return pipe


async def settle() -> None:
    for _turn in range(20):
        await asyncio.sleep(0)


async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer with as many bytes as the path says, whatever else is sent."""
    content = b"x" * int(scope["path"][1:])
    headers = [(b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def ask(size_bytes: int, *headers: bytes) -> bytes:
    lines = [b"GET /%d HTTP/1.1" % size_bytes, b"Host: x", *headers]
    return b"\r\n".join([*lines, b"", b""])


def run(scene: Callable[[], Coroutine[Any, Any, Found]]) -> Found:
    return asyncio.run(scene())


def test_who_reads_nothing_keeps_no_place() -> None:
    async def attack() -> tuple[bytes, list[bool]]:
        limits = ConnectionLimits(connections=2)
        service = Service(RequestLimits(answer, max_requests=1), limits)
        reader, honest = service.connect(), service.connect()
        await reader.send(ask(100_000) * 10)
        await honest.send(ask(1))
        answered = await honest.read()
        return answered, [each.is_aborted for each in (reader, honest, service.connect())]

    answered, are_aborted = run(attack)

    assert answered.startswith(b"HTTP/1.1 200")
    assert are_aborted == [True, False, False]


def test_what_was_asked_behind_an_unread_answer_is_answered_when_that_is_read() -> None:
    async def ask_and_read() -> list[int]:
        reader = Service(answer).connect()
        await reader.send(ask(100_000) * 3 + ask(1) * 2)
        return [(await reader.read()).count(b"HTTP/1.1 200") for _read in range(5)]

    assert run(ask_and_read) == [1, 1, 1, 2, 0]


def test_of_too_much_that_is_unread_the_largest_part_is_dropped() -> None:
    async def attack() -> list[bool]:
        service = Service(answer, ConnectionLimits(unsent_bytes=250_000))
        callers = [service.connect() for _caller in range(3)]
        for caller, size_bytes in zip(callers, (100_000, 120_000, 90_000), strict=True):
            await caller.send(ask(size_bytes))
        return [caller.is_aborted for caller in callers]

    assert run(attack) == [False, True, False]


def test_a_connection_that_is_closing_gives_way() -> None:
    async def attack() -> list[bool]:
        service = Service(answer, ConnectionLimits(connections=1))
        closing = service.connect(Swift())
        await closing.send(ask(1, b"Connection: close"))
        assert closing.is_closing()
        return [each.is_aborted for each in (closing, service.connect())]

    assert run(attack) == [True, False]


def test_who_reads_nothing_does_not_hold_up_the_end() -> None:
    async def stop() -> list[bool]:
        service = Service(answer, ConnectionLimits(leaving_s=0.05))
        reader, idle = service.connect(), service.connect()
        await reader.send(ask(100_000))
        for caller in (reader, idle):
            caller.protocol.shutdown()
        before = [reader.is_aborted, idle.is_closing()]
        await asyncio.sleep(0.2)
        return [*before, reader.is_aborted]

    assert run(stop) == [False, True, True]


def test_of_a_refused_body_only_so_much_is_read() -> None:
    async def attack() -> list[bool]:
        caller = Service(answer, ConnectionLimits(dropped_bytes=1000)).connect()
        await caller.send(ask(1, b"Content-Length: 1000000"))
        seen = []
        for _part in range(3):
            await caller.send(b"x" * 400)
            seen.append(caller.is_aborted)
        return seen

    assert run(attack) == [False, False, True]


@pytest.mark.parametrize(
    ("method", "has_body"), [(b"POST", True), (b"GET", True), (b"HEAD", False)]
)
def test_a_bad_chunk_behind_a_refused_request_is_one_answer(
    method: bytes,
    has_body: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def attack() -> bytes:
        caller = Service(answer).connect()
        await caller.send(method + BAD_CHUNK)
        assert caller.is_closing()
        return await caller.read()

    with caplog.at_level(logging.INFO):
        answered = run(attack)

    head, _, body = answered.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert bool(body) == has_body
    assert answered.count(b"HTTP/1.1 ") == 1
    assert not [each for each in caplog.records if each.exc_info]


async def _read_whole(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body."""
    size_bytes = 0
    while True:
        message = await receive()
        size_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await answer({**scope, "path": f"/{size_bytes}"}, receive, send)


@pytest.mark.parametrize(
    ("size_bytes", "count", "status"),
    [(1, 1024, 200), (1, 1100, 400), (100, 3000, 200), (60, 60_000, 400)],
)
def test_a_body_of_very_many_tiny_chunks_is_refused(
    size_bytes: int, count: int, status: int
) -> None:
    async def post() -> bytes:
        caller = Service(_read_whole).connect()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        content = b"%x\r\n%b\r\n" % (size_bytes, b" " * size_bytes) * count + b"0\r\n\r\n"
        await caller.send(head)
        for begin in range(0, len(content), 2**13):
            if caller.is_closing():
                break
            await caller.send(content[begin : begin + 2**13])
        return await caller.read()

    assert run(post).startswith(b"HTTP/1.1 %d" % status)


def test_little_is_read_in_one_turn_of_the_loop() -> None:
    async def connect() -> int:
        return Service(answer).connect().max_size

    assert run(connect) <= 2**13
