"""Connections with an end: deadlines for headers, body and answer, and a bound on their number.

uvicorn bounds the time between two requests and nothing else: a request that was begun and not
finished stays for ever, and each costs a file descriptor and what came of its body.
"""

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

import gemm_tuner.http_parsing  # noqa: F401 - heads of requests in bounded time
from gemm_tuner.trust.local import peer_uid
from gemm_tuner_service.bounds import MAX_UPLOAD_BYTES
from gemm_tuner_service.clients.peers import UID
from gemm_tuner_service.middleware.lasting import end_lasting, lasting_of
from gemm_tuner_service.problems import problem_response
from gemm_tuner_service.server.tls import Handshake, TlsFiles

_CLOSE = (b"connection", b"close")
_READ_BYTES = 2**13  # at once: a turn of the loop is short, however little each event brings
_DESCRIPTORS_OF_OTHERS = 128  # the database, listening sockets, logs, and some to spare


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How long and how many connections may be.

    `head_s` is for the line and the headers of a request, from the connection or the last answer
    on; `body_s` for its body; `answer_s` for the answer, until the caller has read it, unless it
    is one that lasts. A connection without a request is closed after `idle_s`, and when the service
    is told to stop, any within `leaving_s`. What has come of a head, or of what frames a piece of a
    body, may have `head_bytes`. A body may come in `chunks`, and in one more for each
    `chunk_bytes` of it. When a connection more than `connections` comes, the one that
    has waited longest for its caller is closed. When more than `unsent_bytes` wait for all callers
    to be read, the connection that holds the most is closed. Of a body whose request is answered
    already, `dropped_bytes` are read.
    """

    head_s: float = 10.0
    body_s: float = 10.0
    answer_s: float = 60.0
    idle_s: int = 5
    leaving_s: float = 10.0
    head_bytes: int = 16 * 2**10
    chunks: int = 1024
    chunk_bytes: int = 64
    connections: int = 512
    unsent_bytes: int = 2**26
    dropped_bytes: int = MAX_UPLOAD_BYTES
    backlog: int = 64

    def within(self, descriptors: int) -> "ConnectionLimits":
        """Return these limits, lowered to what a process with so many file descriptors can hold."""
        room = max(16, descriptors - _DESCRIPTORS_OF_OTHERS)
        backlog = min(self.backlog, room // 8)
        # asyncio accepts a backlog in each turn of its loop, and closes what was aborted in a
        # later one.
        return replace(self, connections=min(self.connections, room - 4 * backlog), backlog=backlog)


def server_config(
    app: ASGIApp | Callable[[], ASGIApp],
    limits: ConnectionLimits | None = None,
    *,
    tls: TlsFiles | None = None,
    **settings: Any,  # noqa: ANN401 - uvicorn's
) -> uvicorn.Config:
    """Return how uvicorn runs the service: with bounded connections, HTTP/1.1 and nothing else."""
    chosen = (limits or ConnectionLimits()).within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return uvicorn.Config(
        app,
        loop="asyncio",  # whatever else is installed: uvloop cannot pause what it has just accepted
        http=Connections(chosen, tls),  # type: ignore[arg-type]  # called to make a protocol
        ws="none",
        backlog=chosen.backlog,
        timeout_keep_alive=chosen.idle_s,
        h11_max_incomplete_event_size=chosen.head_bytes,
        proxy_headers=False,
        server_header=False,
        access_log=False,
        **settings,
    )


class Connections:
    """Makes what handles a connection, and knows which of them wait for their callers.

    One process may hand it to another before the first connection.
    """

    def __init__(self, limits: ConnectionLimits, tls: TlsFiles | None) -> None:
        self._limits = limits
        self._tls = tls
        self._waiting = dict[BoundedProtocol | Handshake, None]()

    def __call__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        **arguments: Any,  # noqa: ANN401 - handed on
    ) -> asyncio.Protocol:
        """Return a protocol, as uvicorn asks for one."""

        def make() -> BoundedProtocol:
            return BoundedProtocol(self._limits, self._waiting, config, server_state, **arguments)

        return make() if self._tls is None else self._handshake(make, server_state)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        assert self._tls is not None
        return self._tls.context()

    def _handshake(
        self, make: Callable[[], "BoundedProtocol"], server_state: ServerState
    ) -> Handshake:
        connections: set[Any] = server_state.connections

        def begin(shaking: Handshake) -> None:
            connections.add(shaking)
            self._waiting[shaking] = None
            if len(connections) > self._limits.connections:
                next(iter(self._waiting)).abort()

        def end(shaking: Handshake) -> None:
            connections.discard(shaking)
            self._waiting.pop(shaking, None)

        return Handshake(
            self._context,
            timeout_s=self._limits.head_s,
            flush_s=self._limits.answer_s,
            make=make,
            begun=begin,
            ended=end,
        )


class _Phase(Enum):
    """The state of a connection: what it waits for."""

    HEAD = auto()  # the rest of a request's line and headers, or a request
    BODY = auto()
    ANSWER = auto()  # this service
    READER = auto()  # the caller, to read what was answered


class BoundedProtocol(H11Protocol):
    """A connection that is aborted when its caller is too slow, or when others need its place.

    `waiting` holds the connections that wait for their callers, the longest first. An answer is
    handed over whole, so that what is unsent is known; while a caller has too much to read, the
    requests that follow are not begun.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        waiting: "dict[BoundedProtocol | Handshake, None]",
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._waiting = waiting
        self._phase: _Phase | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_unread = False
        self._dropped_bytes = 0
        self._chunks = 0
        self._body_bytes = 0
        self._parse = self.conn.next_event
        self.conn.next_event = self._next_event  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, in the place of another if there are too many."""
        super().connection_made(transport)
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # asyncio's own
        connection = transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX:
            self.app_state = {**self.app_state, UID: peer_uid(connection)}
        self._follow()
        if len(self.connections) > self._limits.connections:
            next(iter(self._waiting)).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; nobody waits for an answer that lasts any more."""
        self._leave()
        end_lasting(self.scope)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came; a deadline moves when a request is further, not when a byte came."""
        super().data_received(data)
        self._follow()
        self._bound_dropped(len(data))

    def handle_events(self) -> None:
        """Take up what came, unless the caller has to read first."""
        if self.transport.is_closing():
            return
        if not self._is_unread:
            super().handle_events()
            return
        self.flow.pause_reading()
        if self.conn.trailing_data[0]:  # it is no idle connection
            self._unset_keepalive_if_required()

    def _next_event(self) -> Any:  # noqa: ANN401 - an event of h11
        """Return what came next; a body of tiny chunks is refused: each costs as much as a line."""
        event = self._parse()
        if isinstance(event, h11.Request):
            self._chunks = self._body_bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._body_bytes += len(event.data)
            most = self._limits.chunks + self._body_bytes // self._limits.chunk_bytes
            if self._chunks > most:
                raise h11.RemoteProtocolError("too many chunks")
        return event

    def pause_writing(self) -> None:
        """Wait for the caller to read."""
        self._is_unread = True
        self._follow()

    def resume_writing(self) -> None:
        """Take up what came meanwhile."""
        self._is_unread = False
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        self.handle_events()
        self._follow()

    def on_response_complete(self) -> None:
        """Begin to wait for the caller: to read, and to ask again."""
        self._phase = None
        super().on_response_complete()
        self._follow()
        if self.unsent_bytes > HIGH_WATER_LIMIT:
            self._bound_unsent()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request as any other fault, and close the connection."""
        is_begun = self.conn.our_state is h11.SEND_RESPONSE
        if is_begun:  # this is its answer: what else is made has no place to go
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if is_begun or self.conn.our_state is h11.IDLE:  # not answered yet
            fault = f"{msg} Send HTTP/1.1, as RFC 9112 has it."
            answer = problem_response(HTTPStatus.BAD_REQUEST, fault)
            headers = [*self.server_state.default_headers, *answer.raw_headers, _CLOSE]
            is_head = is_begun and self.scope["method"] == "HEAD"
            for event in (
                h11.Response(status_code=answer.status_code, headers=headers),
                h11.Data(data=b"" if is_head else bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio has it
        """Keep the connection for the answer that a caller who sends no more still waits for."""
        if self._phase is not _Phase.ANSWER:
            return False
        end_lasting(self.scope)  # whoever left looks the same
        self.cycle.keep_alive = False
        if self.scheme == "https":  # TLS ends in both directions at once
            self.cycle.disconnected = True
        return self.scheme != "https"

    def shutdown(self) -> None:
        """Close the connection as soon as nobody waits for an answer, and before long in any case.

        An answer that lasts ends now. Who starts the service ends it by force where that takes half
        a minute.
        """
        end_lasting(self.scope)
        if not self.transport.is_closing():
            super().shutdown()
        self.loop.call_later(self._limits.leaving_s, self.abort)

    def abort(self) -> None:
        """Close the connection at once, whatever is unsent."""
        self._leave()
        self.connections.discard(self)
        self.transport.abort()

    @property
    def unsent_bytes(self) -> int:
        """How much was answered and not read."""
        return self.transport.get_write_buffer_size()

    def _follow(self) -> None:
        """Set the deadline of what the connection waits for, if that is new."""
        phase = self._now()
        if phase is self._phase:
            return
        self._leave()
        self._phase = phase
        seconds = {
            _Phase.HEAD: self._limits.head_s,
            _Phase.BODY: self._limits.body_s,
            _Phase.ANSWER: self._limits.answer_s,
            _Phase.READER: self._limits.answer_s,
        }[phase]
        self._timer = self.loop.call_later(seconds, self._expire)
        if phase is not _Phase.ANSWER:
            self._waiting[self] = None

    def _expire(self) -> None:
        """End the connection, unless its answer may still last."""
        lasting = lasting_of(self.scope) if self._phase is _Phase.ANSWER else None
        if lasting is not None and lasting.connection_rest_s > 0:
            self._timer = self.loop.call_later(lasting.connection_rest_s, self._expire)
        else:
            self.abort()

    def _now(self) -> _Phase:
        if self._is_unread or self.transport.is_closing():
            return _Phase.READER
        if self._is_answered() and self.unsent_bytes:
            return _Phase.READER
        state = self.conn.their_state
        if state is h11.IDLE:
            return _Phase.HEAD
        return _Phase.BODY if state is h11.SEND_BODY else _Phase.ANSWER

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _bound_dropped(self, size_bytes: int) -> None:
        """Count what comes of a body whose request is answered, and end what is too long."""
        is_dropped = self._is_answered() and self.conn.their_state is h11.SEND_BODY
        self._dropped_bytes = self._dropped_bytes + size_bytes if is_dropped else 0
        if self._dropped_bytes > self._limits.dropped_bytes:
            self.abort()

    def _bound_unsent(self) -> None:
        """Close who has the most to read, while that of all callers together is too much."""
        connections: set[Any] = self.connections
        unsent = {each: each.unsent_bytes for each in connections}
        while sum(unsent.values()) > self._limits.unsent_bytes:
            most = max(unsent, key=unsent.__getitem__)
            del unsent[most]
            most.abort()

    def _leave(self) -> None:
        self._waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
