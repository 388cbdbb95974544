"""What is noted of every request: its id, a line in the access log, and numbers for Prometheus."""

import json
import logging
import re
import secrets
import time
from datetime import UTC, datetime
from functools import lru_cache
from http import HTTPStatus

from prometheus_client import Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemm_tuner.domain.access import PREFIX
from gemm_tuner_service.logs import ACCESS_LOGGER, without_tokens
from gemm_tuner_service.metrics import IN_PROGRESS, REQUESTS, SECONDS
from gemm_tuner_service.request_ids import REQUEST_ID, REQUEST_ID_HEADER
from gemm_tuner_service.routing import rule_of

CALLER = "caller"  # members of the state of a request, which middleware sets
FROM = "from"  # where it came from, as logs name it

_HEADER = REQUEST_ID_HEADER.lower().encode()
_VALID_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_MAX_PATH = 200
_ACCESS = logging.getLogger(ACCESS_LOGGER)


class Observation:
    """Middleware around all others. A request keeps the id that it came with, if it is valid."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and note what became of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _id_of(scope)
        REQUEST_ID.set(request_id)
        scope.setdefault("state", {})
        status, sent_bytes, begin_s = int(HTTPStatus.INTERNAL_SERVER_ERROR), 0, time.perf_counter()

        async def send_noted(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_HEADER, request_id.encode())]
            else:
                sent_bytes += len(message.get("body", b""))
            await send(message)

        IN_PROGRESS.inc()
        try:
            await self._app(scope, receive, send_noted)
        finally:
            IN_PROGRESS.dec()
            passed_s = time.perf_counter() - begin_s
            _note(scope, request_id, status, sent_bytes, passed_s)


def _id_of(scope: Scope) -> str:
    sent = [value for name, value in scope["headers"] if name == _HEADER]
    if len(sent) == 1 and _VALID_ID.fullmatch(sent[0]):
        return without_tokens(sent[0].decode(), PREFIX)
    return secrets.token_hex(8)


@lru_cache(maxsize=4096)
def _series_of(method: str, route: str, status: int) -> tuple[Counter, Histogram]:
    """Return what counts and times such requests: to find both takes longer than to use them."""
    return REQUESTS.labels(method, route, str(status)), SECONDS.labels(route)


def _note(scope: Scope, request_id: str, status: int, sent_bytes: int, passed_s: float) -> None:
    method = scope["method"]
    rule = rule_of("GET" if method == "HEAD" else method, scope["path"])
    # Names that callers invent would be series without end.
    route, known_method = (rule.path, method) if rule is not None else ("other", "other")
    count, seconds = _series_of(known_method, route, status)
    count.inc()
    seconds.observe(passed_s)
    if not _ACCESS.isEnabledFor(logging.INFO):
        return
    state = scope["state"]
    caller = state.get(CALLER)
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": request_id,
        "caller": state.get(FROM) if caller is None else caller.name,
        "from": state.get(FROM),
        "method": without_tokens(method[:_MAX_PATH]),
        "path": without_tokens(scope["path"])[:_MAX_PATH],
        "route": route,
        "status": status,
        "milliseconds": round(passed_s * 1e3, 3),
        "bytes": sent_bytes,
    }
    _ACCESS.info("%s", json.dumps(line))
