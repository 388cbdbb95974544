"""What all pages have around them: their headers, and errors told as a page."""

import json
import secrets
from http import HTTPStatus
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemm_tuner_service.dashboard.render import NONCE, render
from gemm_tuner_service.problems import MEDIA_TYPE
from gemm_tuner_service.routing import SIGN_IN, is_page

_HTML = "text/html; charset=utf-8"
_NONCE_BYTES = 16
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageShell:
    """Middleware around the routes of pages. It tells errors as a page with the same status.

    Nothing of a page runs, nothing is loaded from elsewhere, and no other site can frame it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or not is_page(scope):
            await self._app(scope, receive, send)
            return
        nonce = scope.setdefault("state", {})[NONCE] = secrets.token_urlsafe(_NONCE_BYTES)
        begun: Message | None = None
        document = bytearray()

        async def send_page(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                headers["Content-Security-Policy"] = _policy(nonce)
                for name, value in _HEADERS.items():
                    headers[name] = value
                if "cache-control" not in headers:
                    headers["Cache-Control"] = "no-store"
                if headers.get("content-type", "").startswith(MEDIA_TYPE):
                    begun = message
                    return
            if begun is None:
                await send(message)
                return
            document.extend(message.get("body", b""))
            if message.get("more_body", False):
                return
            body = _error_page(scope, begun["status"], json.loads(document))
            headers = MutableHeaders(raw=begun["headers"])
            headers["Content-Type"] = _HTML
            headers["Content-Length"] = str(len(body))
            await send(begun)
            await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, send_page)


def _policy(nonce: str) -> str:
    return (
        f"default-src 'none'; style-src 'self' 'nonce-{nonce}'; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    )


def _error_page(scope: Scope, status: int, problem: dict[str, Any]) -> bytes:
    """Return the page of an error: where a token is missing, with the form that takes one."""
    if status == HTTPStatus.UNAUTHORIZED:
        is_form = scope["path"] == SIGN_IN
        return render(
            scope,
            "sign_in.html.j2",
            detail=problem["detail"] if is_form else "",
            wanted="" if is_form else _address_of(scope),
        )
    return render(
        scope, "error.html.j2", status=status, title=problem["title"], detail=problem["detail"]
    )


def _address_of(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    path: str = scope["raw_path"].decode("latin-1").partition("?")[0]
    return f"{path}?{query}" if query else path
