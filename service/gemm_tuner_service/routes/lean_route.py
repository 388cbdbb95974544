"""A route that answers from the bytes of a question, without what only its faults need.

FastAPI describes the route, and says what is wrong with a question. What is right goes past its
dependencies, and is answered in the event loop where the answer is in memory.
"""

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute

from gemm_tuner.errors import InvalidInput
from gemm_tuner_service.caching import tagged
from gemm_tuner_service.dependencies import RunningService

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class LeanResolveRoute(APIRoute):
    """The route of `POST /v1/resolve`."""

    def get_route_handler(self) -> _Handler:
        """Return what answers a request: from its bytes, or as FastAPI does where it cannot."""
        thorough = super().get_route_handler()

        async def answer(request: Request) -> Response:
            # A query asks for more than an answer from memory.
            if (
                request.scope["query_string"]
                or request.headers.get("content-type") != "application/json"
            ):
                return await thorough(request)
            service = cast("RunningService", request.app.state.service)
            try:
                asked = service.questions.in_body(await request.body())
            except (ValueError, RecursionError, InvalidInput):
                return await thorough(request)
            answer = service.resolver.known_answer(asked, datetime.now(UTC))
            if answer is None:
                answer = await service.gathering.answer(asked)
            return tagged(answer, request.headers.get("if-none-match"))

        return answer
