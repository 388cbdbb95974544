"""HEAD for every route that answers GET."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_IS_HEAD = "is_head"  # a member of the state of a request


class HeadAsGet:
    """Middleware that answers HEAD as it would GET, with the same headers and no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and leave the body of the answer out."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        # Ranges are for GET alone (RFC 9110, section 14.2).
        headers = [each for each in scope["headers"] if each[0] != b"range"]
        scope.setdefault("state", {})[_IS_HEAD] = True
        await self._app({**scope, "method": "GET", "headers": headers}, receive, send_head)


def is_head(scope: Scope) -> bool:
    """Return whether a request that is answered as GET wants the headers alone."""
    return _IS_HEAD in scope["state"]
