"""Bounds on what requests may carry, on what all of them hold, and on how many are answered."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemm_tuner.domain.access import Scope as AccessScope
from gemm_tuner_service.bounds import MAX_BODY_BYTES, MAX_UPLOAD_BYTES
from gemm_tuner_service.problems import problem_response
from gemm_tuner_service.routing import LIVENESS, rule_of

MAX_UNFINISHED_BYTES = 2**24
MAX_REQUESTS = 64

LEAVE = "leave"  # the member of the state of a request that gives its place to others

_BODY_HEADERS = {b"content-length", b"transfer-encoding"}
_CLOSE = {"Connection": "close"}
_LATER = {"Retry-After": "1", **_CLOSE}


class FramingControl:
    """Middleware that refuses a body whose end a proxy may see elsewhere (RFC 9112, 6.3)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if it has one length."""
        if scope["type"] == "http" and _header_names(scope) >= _BODY_HEADERS:
            await problem_response(
                HTTPStatus.BAD_REQUEST,
                "the request has both Content-Length and Transfer-Encoding; send one of them.",
                _CLOSE,
            )(scope, receive, send)
            return
        await self._app(scope, receive, send)


class RequestLimits:
    """Middleware that reads a body before it is parsed, and answers only so many at once.

    A body may have `MAX_BODY_BYTES`, and what workers bring `MAX_UPLOAD_BYTES`. When the unfinished
    bodies of all callers hold more than `max_unfinished_bytes`, the oldest is given up with 503, so
    that a small one comes through. Whether the process lives is answered always. A request that
    waits for something else than this service can leave its place to others, by what is in its
    state as `LEAVE`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_unfinished_bytes: int = MAX_UNFINISHED_BYTES,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self._app = app
        self._bodies = _Bodies(max_unfinished_bytes)
        self._max_requests = max_requests
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or answer why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if _has_body(scope):
                receive = _replay(await self._bodies.read(receive, max_body_bytes(scope)), receive)
            self._check_room(scope)
        except _Refusal as refusal:
            await problem_response(refusal.status, refusal.detail, refusal.headers)(
                scope, receive, send
            )
            return
        except _CallerLeft:
            return
        leave = scope.setdefault("state", {})[LEAVE] = self._enter()
        try:
            await self._app(scope, receive, send)
        finally:
            leave()

    def _enter(self) -> Callable[[], None]:
        """Count a request, until what is returned is called for the first time."""
        self._requests += 1
        has_left = False

        def leave() -> None:
            nonlocal has_left
            if not has_left:
                has_left = True
                self._requests -= 1

        return leave

    def _check_room(self, scope: Scope) -> None:
        if self._requests >= self._max_requests and scope["path"] != LIVENESS:
            raise _Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self._requests} requests are being answered; ask again in a second.",
            )


class _Refusal(Exception):
    """A request that is not answered: with which status, and why."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = _LATER if status == HTTPStatus.SERVICE_UNAVAILABLE else _CLOSE


class _CallerLeft(Exception):
    """The caller closed the connection before the body was whole."""


class _Bodies:
    """The bodies that are being read: how much they hold, the oldest first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: dict[asyncio.Task[object], int] = {}
        self._total_bytes = 0
        self._given_up: set[asyncio.Task[object]] = set()

    async def read(self, receive: Receive, limit_bytes: int) -> bytes:
        """Return a whole body of at most `limit_bytes`."""
        task = asyncio.current_task()
        assert task is not None
        self._sizes[task] = 0
        body = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _CallerLeft
                chunk = message.get("body", b"")
                body += chunk
                if len(body) > limit_bytes:
                    raise _Refusal(
                        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                        f"the body is longer than {limit_bytes} bytes; send less at once.",
                    )
                self._count(task, len(chunk))
                if not message.get("more_body", False):
                    return bytes(body)
        except asyncio.CancelledError:
            if task not in self._given_up:
                raise
            task.uncancel()
            raise _too_many() from None
        finally:
            self._total_bytes -= self._sizes.pop(task)
            self._given_up.discard(task)

    def _count(self, task: "asyncio.Task[object]", size_bytes: int) -> None:
        self._sizes[task] += size_bytes
        self._total_bytes += size_bytes
        held = self._total_bytes - sum(self._sizes[each] for each in self._given_up)
        if held <= self._max_bytes:
            return
        oldest = next(each for each in self._sizes if each not in self._given_up)
        if oldest is task:
            raise _too_many()
        self._given_up.add(oldest)
        oldest.cancel()


def max_body_bytes(scope: Scope) -> int:
    """Return how long the body of a request may be: what workers bring is longer."""
    rule = rule_of(scope.get("method", ""), scope.get("path", ""))
    is_upload = rule is not None and rule.scope is AccessScope.RECORDS_WRITE
    return MAX_UPLOAD_BYTES if is_upload else MAX_BODY_BYTES


def _too_many() -> _Refusal:
    return _Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "too many bodies are unfinished, and this one for the longest time; send it again.",
    )


def _has_body(scope: Scope) -> bool:
    return not _BODY_HEADERS.isdisjoint(_header_names(scope))


def _header_names(scope: Scope) -> set[bytes]:
    return {name for name, _value in scope["headers"]}


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receiver that gives `body` at once, and then later messages."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
