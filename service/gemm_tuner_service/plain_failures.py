"""A start that fails is told in one line, as the command line tells it."""

import sys
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemm_tuner.errors import GemmTunerError


@dataclass(frozen=True, slots=True)
class PlainFailures:
    """Middleware that gives the server the text of an error of ours, and not its traceback.

    Such an error names what is wrong from outside, such as a database that went away after the
    command looked for it. Any other is a fault of this program, whose traceback says where.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on, but for the text of a start or an end that failed."""
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return

        async def tell(message: Message) -> None:
            # Starlette tells it while it handles the error.
            error = sys.exception()
            if message["type"].endswith(".failed") and isinstance(error, GemmTunerError):
                message = {**message, "message": str(error)}
            await send(message)

        await self.app(scope, receive, tell)
