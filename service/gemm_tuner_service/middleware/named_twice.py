"""A question that gives a name twice is refused: nobody knows which value is meant."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from gemm_tuner_service.problems import Fault, invalid_request

_LONGEST_SHOWN = 64
_WITHOUT_QUERIES = {"/healthz", "/metrics", "/readyz"}  # monitoring adds names of its own


class NamedTwice(ValueError):
    """A name is given more than once."""


def members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return what is named, for `json.loads`.

    Raises:
        NamedTwice: a name is there more than once.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _count)] = Counter(name for name, _value in pairs).most_common(1)
        raise NamedTwice(f"{name[:_LONGEST_SHOWN]!r} is given more than once; give it once")
    return found


class NamesOnce:
    """Middleware that refuses a query which gives a name twice, at every route that reads one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on if each name is there once."""
        try:
            query = scope.get("query_string")
            if query and scope["path"] not in _WITHOUT_QUERIES:
                members(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
        except NamedTwice as error:
            refusal = invalid_request(Fault(pointer="", detail=str(error)))
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _check_names(request: Request) -> None:
    try:
        _check_body(await request.body())
    except NamedTwice as error:
        fault = {"type": "value_error", "loc": ("body",), "msg": str(error)}
        raise RequestValidationError([fault]) from None


def _check_body(body: bytes) -> None:
    try:
        # Numbers stay texts: a long one would not become a number.
        json.loads(body, object_pairs_hook=members, parse_int=str, parse_float=str)
    except NamedTwice:
        raise
    except (ValueError, RecursionError):
        return  # what is no JSON is refused elsewhere, in other words


# The dependency of routes with such questions in their bodies.
NAMES_ONCE = Depends(_check_names)
