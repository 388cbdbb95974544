"""HTTP to one service; what goes wrong on the way becomes an error of ours."""

import ipaddress
import json
from hashlib import sha256
from http import HTTPStatus
from typing import Any

import httpx

from gemm_tuner.errors import DigestMismatch, InvalidSetting, ServiceFailed, ServiceUnreachable

_TIMEOUT_S = 10.0
_MAX_DOCUMENT_BYTES = 2**20
_MAX_PORT = 65535


class Transport:
    """The requests a client makes to the service at `url`.

    Raises:
        InvalidSetting: the address cannot be used.
    """

    def __init__(self, url: str) -> None:
        try:
            address = httpx.URL(url)
        except httpx.InvalidURL:
            address = httpx.URL()
        has_port = address.port is None or address.port <= _MAX_PORT
        if address.scheme not in {"http", "https"} or not address.host or not has_port:
            raise InvalidSetting(
                f"service address {url!r} is not understood; write it as 'http://host:8000'."
            )
        self.url = url.rstrip("/")
        self.is_loopback = _is_loopback(address.host)

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
                f"{path} at {self.url} does not have the {size_bytes} bytes that were signed; "
                "nothing was loaded: check the service."
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
        try:
            with httpx.stream(
                method,
                self.url + path,
                json=body,
                headers=headers,
                timeout=_TIMEOUT_S,
                trust_env=not self.is_loopback,  # a proxy cannot reach this machine
            ) as response:
                status = response.status_code
                content = _read(response, limit_bytes)
        except (httpx.RequestError, UnicodeError) as error:
            raise ServiceUnreachable(
                f"the service at {self.url} does not answer ({error}); check the address, "
                'or start one with "gemm-tuner serve".'
            ) from None
        if response.is_success or status == HTTPStatus.NOT_MODIFIED:
            return status, content
        failure = ServiceUnreachable if response.is_server_error else ServiceFailed
        raise failure(
            f"{method} {path} at {self.url} was answered with {status}: {_problem_text(content)}"
        )


def _read(response: httpx.Response, limit_bytes: int) -> bytes:
    content = bytearray()
    for chunk in response.iter_bytes():
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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
