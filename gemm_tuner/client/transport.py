"""HTTP to one service; what goes wrong on the way becomes an error of ours."""

import ipaddress
from typing import Any
from urllib.parse import urlsplit

import httpx

from gemm_tuner.errors import InvalidSetting, ServiceFailed, ServiceUnreachable

_TIMEOUT_S = 10.0


class Transport:
    """The requests a client makes to the service at `url`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidSetting(
                f"service address {url!r} is not understood; write it as 'http://host:8000'."
            )
        self.url = url.rstrip("/")
        self.is_loopback = _is_loopback(parts.hostname)

    def resolve(self, request: dict[str, Any]) -> bytes:
        """Return the answer to `POST /v1/resolve`, not yet parsed."""
        return self._send("POST", "/v1/resolve", json=request)

    def keys(self) -> bytes:
        """Return the answer to `GET /v1/keys`, not yet parsed."""
        return self._send("GET", "/v1/keys")

    def artifact(self, digest: str) -> bytes:
        """Return the bytes served under this sha256, not yet checked."""
        return self._send("GET", f"/v1/artifacts/sha256/{digest}")

    def _send(self, method: str, path: str, json: dict[str, Any] | None = None) -> bytes:
        try:
            response = httpx.request(
                method,
                self.url + path,
                json=json,
                timeout=_TIMEOUT_S,
                trust_env=not self.is_loopback,  # a proxy cannot reach this machine
            )
        except httpx.TransportError as error:
            raise ServiceUnreachable(
                f"the service at {self.url} does not answer ({error}); check the address, "
                'or start one with "gemm-tuner serve".'
            ) from None
        if response.is_success:
            return response.content
        raise ServiceFailed(
            f"{method} {path} at {self.url} was answered with {response.status_code}: "
            f"{_problem_text(response)}"
        )


def _problem_text(response: httpx.Response) -> str:
    """Return title and detail of a problem document (RFC 9457), or the start of what else came."""
    try:
        document = response.json()
        return f"{document['title']}: {document['detail']}"
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or "no explanation."


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
