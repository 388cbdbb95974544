"""HTTP to one service; what goes wrong on the way becomes an error of ours."""

import ipaddress
import json
import ssl
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpcore

from gemm_tuner.client.connection import BoundedBackend, Deadline
from gemm_tuner.errors import DigestMismatch, InvalidSetting, ServiceFailed, ServiceUnreachable

UNIX = "unix:"

_MAX_DOCUMENT_BYTES = 2**20
_FAILURES = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    UnicodeError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a service is: `url` as its users write it, and what is asked below it.

    `socket` is the path of a Unix socket. An address is local if only this machine can answer.
    """

    url: str
    base: str
    socket: Path | None
    is_local: bool

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Return the address written as `http://host:8000` or `unix:/path/of/a/socket`.

        Raises:
            InvalidSetting: it is neither.
        """
        if url.startswith(UNIX) and url != UNIX:
            path = Path(url.removeprefix(UNIX))
            return cls(url=f"{UNIX}{path}", base="http://localhost", socket=path, is_local=True)
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode() if parts.hostname else ""
            is_known = parts.scheme in {"http", "https"} and bool(host) and parts.port != 0
        except (ValueError, UnicodeError):
            is_known = False
        if not is_known:
            raise InvalidSetting(
                f"service address {url!r} is not understood; write it as 'http://host:8000' "
                "or 'unix:/path/of/a/socket'."
            )
        shown = f"[{host}]" if ":" in host else host
        port = f":{parts.port}" if parts.port else ""
        base = f"{parts.scheme}://{shown}{port}{quote(parts.path, safe='/%')}"
        return cls(
            url=url.rstrip("/"), base=base.rstrip("/"), socket=None, is_local=_is_local(host)
        )


@contextmanager
def connect(address: Address, timeout_s: float) -> Iterator["Session"]:
    """Yield a session with the service at `address`, which ends in `timeout_s` from now.

    One connection serves the whole session. Nothing is connected before the first request.
    """
    with _pool(address, BoundedBackend(Deadline(timeout_s))) as pool:
        yield Session(address, pool)


class Session:
    """The requests of one ask; use `connect` to get one."""

    def __init__(self, address: Address, pool: httpcore.ConnectionPool) -> None:
        self._address = address
        self._pool = pool

    def resolve(self, request: dict[str, Any], kept: bytes | None) -> bytes:
        """Return the answer to `POST /v1/resolve`, not yet parsed.

        It is `kept`, an earlier answer, if the service says that this one is unchanged.
        """
        # The entity tag of an answer is its sha256: docs/service.md promises it.
        headers = {} if kept is None else {"If-None-Match": f'"{sha256(kept).hexdigest()}"'}
        status, content = self._send("POST", "/v1/resolve", body=request, headers=headers)
        return kept if status == HTTPStatus.NOT_MODIFIED and kept is not None else content

    def resolve_batch(self, request: dict[str, Any]) -> bytes:
        """Return the answer to `POST /v1/resolve:batch`, not yet parsed."""
        return self._send("POST", "/v1/resolve:batch", body=request)[1]

    def keys(self) -> bytes:
        """Return the answer to `GET /v1/keys`, not yet parsed."""
        return self._send("GET", "/v1/keys")[1]

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
        """Return the status and the content, cut off soon after `limit_bytes`."""
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        if body is not None:
            sent["Content-Type"] = "application/json"
        try:
            with self._pool.stream(
                method,
                self._address.base + path,
                headers=list(sent.items()),
                content=None if body is None else json.dumps(body).encode(),
            ) as response:
                status = response.status
                content = _read(response, limit_bytes)
        except _FAILURES as error:
            raise ServiceUnreachable(
                f"the service at {self._address.url} does not answer ({error}); check the address, "
                'or start one with "gemm-tuner serve".'
            ) from None
        if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            return status, content
        if status == HTTPStatus.NOT_MODIFIED:
            return status, content
        is_fault = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        failure = ServiceUnreachable if is_fault else ServiceFailed
        raise failure(
            f"{method} {path} at {self._address.url} was answered with {status}: "
            f"{_problem_text(content)}"
        )


def _pool(address: Address, backend: BoundedBackend) -> httpcore.ConnectionPool:
    context = _trusted_roots() if address.base.startswith("https:") else None
    proxy = None if address.is_local else _proxy_for(address.base)
    if proxy is None:
        return httpcore.ConnectionPool(
            ssl_context=context,
            max_connections=1,
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
        max_connections=1,
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
            f"the proxy for {parts.scheme} is {proxy!r}, which is not an HTTP proxy; "
            "name another, or add the service to no_proxy."
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
        return f"{document['title']}: {document['detail']}"
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace") or "no explanation."


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
