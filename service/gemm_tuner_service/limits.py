"""Bounds on what a request may carry."""

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 2**20
MAX_BATCH = 1000
MAX_PAGE = 1000


class BodyLimit:
    """Middleware that stops reading a request's body at `MAX_BODY_BYTES`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count what is read of its body."""
        received_bytes = 0

        async def counted() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > MAX_BODY_BYTES:
                raise HTTPException(
                    413,
                    f"the body is longer than {MAX_BODY_BYTES} bytes; send fewer problems at once.",
                )
            return message

        await self._app(scope, counted, send)
