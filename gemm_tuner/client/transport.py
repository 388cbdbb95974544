"""HTTP to one service; what goes wrong on the way becomes an error of ours."""

import ipaddress
import json
import os
import re
import ssl
import threading
import time
import weakref
from base64 import b64encode
from dataclasses import dataclass, field, replace
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpcore

import gemm_tuner.http_parsing  # noqa: F401 - heads of answers in bounded time
from gemm_tuner.client.connection import BoundedBackend, Deadline, OtherUserListens
from gemm_tuner.client.retries import Dropped, NoAnswer, Passing, ask_again, retry_after_s
from gemm_tuner.domain.access import TokenSecret
from gemm_tuner.domain.printable import quoted
from gemm_tuner.errors import (
    DigestMismatch,
    InvalidSetting,
    QuestionNotKnown,
    ServiceFailed,
    ServiceUnreachable,
)

UNIX = "unix:"
TOKEN_VARIABLE = "GEMM_TUNER_TOKEN"  # noqa: S105 - its name

_MAX_DOCUMENT_BYTES = 2**20
_MAX_ITEM_BYTES = 2**14
_FAILURES = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    UnicodeError,
)
_PASSING = (httpcore.NetworkError, httpcore.RemoteProtocolError)
_BUSY = frozenset({429, 502, 503, 504})
# What a service says of problems that this package has checked, if it knows fewer.
_NOT_KNOWN = frozenset(
    f"urn:gemm-tuner:problem:{name}" for name in ("invalid-problem", "invalid-epilogue")
)

AWAY_S = 5.0

# At once; more wait for one of these.
MAX_CONNECTIONS = 4

# The service closes idle connections after 5 s; one that is closed in the moment of asking costs a
# second attempt.
_KEPT_FOR_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a service is: `url` as messages and files name it, and what is asked below it.

    `url` has no password. `socket` is the path of a Unix socket. An address is local if only this
    machine can answer.
    """

    url: str
    base: str
    socket: Path | None
    is_local: bool
    token: TokenSecret | None = field(default=None, repr=False)

    def with_token(self, token: str | None) -> "Address":
        """Return this address, asked with a token; by default with none, or GEMM_TUNER_TOKEN's.

        A service on this machine needs none, and gets that of the environment not: anyone can
        hold a port.

        Raises:
            InvalidSetting: it is no token, or others could read it on the way.
        """
        configured = None if self.is_local else os.environ.get(TOKEN_VARIABLE)
        text = configured or None if token is None else token
        if text is None:
            return self
        secret = TokenSecret.parse(text)
        if not self.is_local and not self.base.startswith("https:"):
            raise InvalidSetting(
                f"a token would be sent to {self.url} in clear text; ask by https."
            )
        return replace(self, token=secret)

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Return the address written as `http://host:8000` or `unix:/path/of/a/socket`.

        Raises:
            InvalidSetting: it is neither.
        """
        if url.startswith(UNIX) and url != UNIX and url.isprintable():
            path = Path(url.removeprefix(UNIX))
            return cls(url=f"{UNIX}{path}", base="http://localhost", socket=path, is_local=True)
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode() if parts.hostname else ""
            is_known = parts.scheme in {"http", "https"} and bool(host) and parts.port != 0
            is_known &= url.isprintable() and not set(" ?#") & set(url)
        except (ValueError, UnicodeError):
            is_known = False
        if not is_known:
            raise InvalidSetting(
                f"service address {_without_password(url)!r} is not understood; "
                "write it as 'http://host:8000' or 'unix:/path/of/a/socket'."
            )
        shown = f"[{host}]" if ":" in host else host
        port = f":{parts.port}" if parts.port else ""
        base = f"{parts.scheme}://{shown}{port}{quote(parts.path, safe='/%')}"
        named = _without_password(url) if parts.password is not None else url
        return cls(
            url=named.rstrip("/"), base=base.rstrip("/"), socket=None, is_local=_is_local(host)
        )


class Connections:
    """The connections to one service, kept for the next ask and closed with this object.

    Any number of threads can use them. A forked child connects anew: two processes that read one
    connection would take each other's answers.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._current = _Current()
        self._absence: tuple[float, NoAnswer] | None = None
        self._pools: dict[int, httpcore.ConnectionPool] = {}
        weakref.finalize(self, _close_own, self._pools)

    def session(self, timeout_s: float) -> "Session":
        """Return what asks the service until `timeout_s` from now. Nothing is connected yet."""
        return Session(self, Deadline(timeout_s))

    def note_absence(self, error: NoAnswer) -> None:
        """Remember for `AWAY_S` that nothing answers."""
        self._absence = (time.monotonic() + AWAY_S, error)

    def forget_absence(self) -> None:
        """Ask again, whatever was noted."""
        self._absence = None

    def check_presence(self) -> None:
        """Raise `ServiceUnreachable` if nothing answered a moment ago.

        A model of a hundred layers would else wait for a service that is away a hundred times.
        """
        absence = self._absence
        if absence is not None and time.monotonic() < absence[0]:
            raise ServiceUnreachable(
                f"{absence[1]} It was asked less than {AWAY_S:g} s ago, and not again for this."
            )

    def pool(self, deadline: Deadline) -> httpcore.ConnectionPool:
        """Return the pool of this process, for one request of this thread until `deadline`."""
        self._current.deadline = deadline
        own = self._pools.get(os.getpid())
        if own is None:
            made = _pool(self.address, BoundedBackend(self._current.get))
            own = self._pools.setdefault(os.getpid(), made)
        return own


class _Current(threading.local):
    """The deadline of the request that a thread is sending."""

    deadline: Deadline

    def get(self) -> Deadline:
        return self.deadline


def _close_own(pools: dict[int, httpcore.ConnectionPool]) -> None:
    own = pools.get(os.getpid())
    if own is not None:
        own.close()


class Session:
    """The requests of one ask, which share a deadline; any thread may send one."""

    def __init__(self, connections: Connections, deadline: Deadline) -> None:
        self._connections = connections
        self._address = connections.address
        self._deadline = deadline

    def rest_s(self) -> float:
        """Return the seconds that are left of the ask."""
        return self._deadline.rest_s()

    def within(self, timeout_s: float) -> "Session":
        """Return a session for a part of the ask, which may take so long at most."""
        return Session(self._connections, Deadline(min(timeout_s, self.rest_s())))

    def resolve(self, request: dict[str, Any], kept: bytes | None) -> bytes:
        """Return the answer to `POST /v1/resolve`, not yet parsed.

        It is `kept`, an earlier answer, if the service says that this one is unchanged.
        """
        # The entity tag of an answer is its sha256: docs/service.md promises it.
        headers = {} if kept is None else {"If-None-Match": f'"{sha256(kept).hexdigest()}"'}
        status, content = self._send("POST", "/v1/resolve", body=request, headers=headers)
        return kept if status == HTTPStatus.NOT_MODIFIED and kept is not None else content

    def tune(self, request: dict[str, Any]) -> bytes | None:
        """Return the answer to `POST /v1/resolve?tune=auto` if it names a job, not yet parsed."""
        status, content = self._send("POST", "/v1/resolve?tune=auto", body=request)
        return content if status == HTTPStatus.ACCEPTED else None

    def job(self, job_id: str) -> bytes:
        """Return the answer to `GET /v1/jobs/{id}`, not yet parsed."""
        return self._send("GET", f"/v1/jobs/{job_id}")[1]

    def resolve_batch(self, request: dict[str, Any]) -> bytes:
        """Return the answer to `POST /v1/resolve:batch`, not yet parsed."""
        limit_bytes = _MAX_DOCUMENT_BYTES + len(request["problems"]) * _MAX_ITEM_BYTES
        return self._send("POST", "/v1/resolve:batch", body=request, limit_bytes=limit_bytes)[1]

    def keys(self) -> bytes:
        """Return the answer to `GET /v1/keys`, not yet parsed."""
        return self._send("GET", "/v1/keys")[1]

    def records(self, cursor: int, limit: int, *, limit_bytes: int) -> bytes:
        """Return the answer to `GET /v1/records` for a page, not yet parsed."""
        path = f"/v1/records?cursor={cursor}&limit={limit}"
        return self._send("GET", path, limit_bytes=limit_bytes)[1]

    def revocations(self) -> bytes:
        """Return the answer to `GET /v1/revocations`, not yet parsed."""
        return self._send("GET", "/v1/revocations")[1]

    def artifact(self, digest: str, size_bytes: int) -> bytes:
        """Return the bytes served under this sha256, not yet checked but for their number.

        Raises:
            DigestMismatch: there are more or fewer than `size_bytes`.
        """
        path = f"/v1/artifacts/sha256/{digest}"
        content = self._send("GET", path, limit_bytes=size_bytes)[1]
        if len(content) != size_bytes:
            raise DigestMismatch(
                f"{path} at {self._address.url} does not have the {size_bytes} bytes that were "
                "signed; nothing was loaded: check the service."
            )
        return content

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        limit_bytes: int = _MAX_DOCUMENT_BYTES,
    ) -> tuple[int, bytes]:
        """Return the status and the content, cut off soon after `limit_bytes`.

        Raises:
            ServiceUnreachable: nothing answers, after several attempts, or the service cannot now.
            QuestionNotKnown: it is older, and cannot use the question.
            ServiceFailed: the service refuses the request.
        """
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        if self._address.token is not None:
            sent["Authorization"] = f"Bearer {self._address.token.text}"
        if body is not None:
            sent["Content-Type"] = "application/json"
        content = None if body is None else json.dumps(body).encode()

        def send_once() -> tuple[int, bytes]:
            return self._send_once(method, path, list(sent.items()), content, limit_bytes)

        try:
            return ask_again(send_once, self._deadline)
        except NoAnswer as error:
            self._connections.note_absence(error)
            raise

    def _send_once(
        self,
        method: str,
        path: str,
        headers: list[tuple[str, str]],
        content: bytes | None,
        limit_bytes: int,
    ) -> tuple[int, bytes]:
        try:
            with self._connections.pool(self._deadline).stream(
                method,
                self._address.base + path,
                headers=headers,
                content=content,
                extensions={"timeout": {"pool": self._deadline.left_s()}},
            ) as response:
                answer = _read(response, limit_bytes)
        except _FAILURES as error:
            passes = isinstance(error, _PASSING) and not isinstance(error, OtherUserListens)
            raise (Dropped if passes else NoAnswer)(
                f"the service at {self._address.url} does not answer ({quoted(str(error))}); check "
                'the address, or start one with "gemm-tuner serve".'
            ) from None
        status = response.status
        if status == HTTPStatus.NOT_MODIFIED or status // 100 == 2:
            return status, answer
        message = (
            f"{method} {path} at {self._address.url} was answered with {status}: "
            f"{_problem_text(answer)}"
        )
        if status in _BUSY:
            said = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            raise Passing(message, after_s=retry_after_s(said.get(b"retry-after")))
        if status == HTTPStatus.UNPROCESSABLE_ENTITY and _kind(answer) in _NOT_KNOWN:
            raise QuestionNotKnown(
                "the service's version does not know this problem; update the service to have its "
                f"kernels. {message}",
                status,
            )
        is_fault = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        raise (ServiceUnreachable if is_fault else ServiceFailed)(message, status)


# What asks the service until the deadline of an ask, or why nothing does.
Asking = Session | ServiceUnreachable | QuestionNotKnown


def _pool(address: Address, backend: BoundedBackend) -> httpcore.ConnectionPool:
    context = _trusted_roots() if address.base.startswith("https:") else None
    proxy = None if address.is_local else _proxy_for(address.base)
    if proxy is None:
        return httpcore.ConnectionPool(
            ssl_context=context,
            max_connections=MAX_CONNECTIONS,
            keepalive_expiry=_KEPT_FOR_S,
            uds=None if address.socket is None else str(address.socket),
            network_backend=backend,
        )
    parts = urlsplit(proxy)
    credentials = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
    basic = [(b"Proxy-Authorization", b"Basic " + b64encode(credentials))]
    return httpcore.HTTPProxy(
        f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}",
        proxy_headers=basic if parts.username else None,
        ssl_context=context,
        max_connections=MAX_CONNECTIONS,
        keepalive_expiry=_KEPT_FOR_S,
        network_backend=backend,
    )


def _trusted_roots() -> ssl.SSLContext:
    import httpx  # noqa: PLC0415 - slow to import, and only needed for TLS

    return httpx.create_ssl_context()


def _proxy_for(base: str) -> str | None:
    """Return the HTTP proxy that the environment names for an address."""
    parts = urlsplit(base)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        raise InvalidSetting(
            f"the proxy for {parts.scheme} is {_without_password(proxy)!r}, which is not an HTTP "
            "proxy; name another, or add the service to no_proxy."
        )
    return proxy


def _read(response: httpcore.Response, limit_bytes: int) -> bytes:
    content = bytearray()
    for chunk in response.iter_stream():
        content += chunk
        if len(content) > limit_bytes:
            break
    return bytes(content)


def _problem_text(content: bytes) -> str:
    """Return title and detail of a problem document (RFC 9457), or the start of what else came."""
    try:
        document = json.loads(content)
        text = f"{document['title']}: {document['detail']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        text = content[:200].decode(errors="replace")
    return quoted(text) or "no explanation."


def _kind(content: bytes) -> str:
    """Return the type of a problem document, or nothing where it is none."""
    try:
        return str(json.loads(content)["type"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _without_password(url: str) -> str:
    """Return `http://user:***@host` for an address with a password, however it is misspelt."""
    return re.sub(r"([^:/@]*):(?!//).*@", r"\1:***@", url, count=1)


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
