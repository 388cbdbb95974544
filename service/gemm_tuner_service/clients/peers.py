"""Where a request comes from: a user of this machine, a loopback address, or beyond.

What a proxy says of its callers counts only if the proxy was named at the start. A browser of this
machine may ask for a web site whose name was made to lead here (DNS rebinding): such a request
names that site, and comes from beyond.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self

from starlette.types import Scope as AsgiScope

from gemm_tuner.errors import InvalidSetting

UID = "uid"  # the member of an ASGI scope's state: the user at the other end of a Unix socket

_Address = IPv4Address | IPv6Address
_FORWARDING = (b"forwarded", b"x-forwarded", b"x-real-ip", b"via")  # how headers of proxies begin
_IPV6_CUSTOMER_BITS = 64  # one customer has at least so many addresses
_ROOT_UID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where a request comes from.

    `key` names the caller for limits, `name` for logs. `is_private` says that nobody between
    could read the request.
    """

    key: str
    name: str
    is_local_user: bool = False
    is_loopback: bool = False
    is_private: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxies:
    """The proxies that are believed: their addresses, and whether one sits at the Unix socket."""

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    at_socket: bool = False

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Return the proxies written as addresses, networks or `unix`.

        Raises:
            InvalidSetting: one is neither.
        """
        names = list(texts)
        try:
            networks = tuple(ip_network(each) for each in names if each != "unix")
        except ValueError as error:
            raise InvalidSetting(
                f"proxy is not understood ({error}); write its address, as 10.0.0.7, "
                "its network, as 10.0.0.0/24, or unix for the socket."
            ) from None
        return cls(networks=networks, at_socket="unix" in names)

    def peer_of(self, scope: AsgiScope) -> Peer:
        """Return where the request of an ASGI scope comes from."""
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        is_forwarded = any(name.startswith(_FORWARDING) for name, _value in headers)
        uid = scope.get("state", {}).get(UID)
        if uid is not None:
            direct = _of_user(uid)
            is_proxy = self.at_socket
        else:
            host = scope["client"][0] if scope.get("client") else ""
            direct = _direct(host, is_encrypted=scope.get("scheme") == "https")
            is_proxy = self._has(_address_of(host))
        if is_proxy:
            return self._forwarded(direct, headers)
        if is_forwarded and (direct.is_loopback or direct.is_local_user):
            # A proxy that was not named: its callers need not be of this machine.
            return Peer(key=direct.key, name=direct.name)
        if direct.is_loopback and uid is None and not _asks_this_machine(headers):
            return replace(direct, is_loopback=False)
        return direct

    def _forwarded(self, proxy: Peer, headers: Sequence[tuple[bytes, bytes]]) -> Peer:
        """Return the nearest caller that is no proxy, as the proxy names it."""
        chain = [
            each.strip()
            for name, value in headers
            if name == b"x-forwarded-for"
            for each in value.decode("latin-1").split(",")
        ]
        schemes = [value for name, value in headers if name == b"x-forwarded-proto"]
        is_encrypted = schemes == [b"https"]
        for each in reversed(chain):
            address = _address_of(each)
            if address is None:
                break
            if not self._has(address):
                key = _key_of(address)
                return Peer(key=key, name=str(address), is_private=is_encrypted)
        return Peer(key=proxy.key, name=f"behind {proxy.name}", is_private=is_encrypted)

    def _has(self, address: _Address | None) -> bool:
        return address is not None and any(address in network for network in self.networks)


NO_PROXIES = Proxies()


def _of_user(uid: int) -> Peer:
    """Return a caller at the socket: another user than this one and root is as one on loopback."""
    is_own = uid in {os.getuid(), _ROOT_UID}
    name = f"uid {uid}"
    return Peer(key=name, name=name, is_local_user=is_own, is_loopback=not is_own, is_private=True)


def _asks_this_machine(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return whether a request names no other host than this machine itself."""
    return all(_is_loopback(value) for name, value in headers if name == b"host")


@lru_cache(maxsize=1024)
def _is_loopback(host: bytes) -> bool:
    text = host.decode("latin-1").lower()
    address = _address_of(text)
    if address is not None:
        return address.is_loopback
    name = text.partition(":")[0].removesuffix(".")
    return name == "localhost" or name.endswith(".localhost")


@lru_cache(maxsize=1024)
def _direct(host: str, *, is_encrypted: bool) -> Peer:
    address = _address_of(host)
    if address is None:
        return Peer(key="unknown", name="unknown", is_private=is_encrypted)
    return Peer(
        key=_key_of(address),
        name=str(address),
        is_loopback=address.is_loopback,
        is_private=is_encrypted or address.is_loopback,
    )


@lru_cache(maxsize=1024)
def _address_of(text: str) -> _Address | None:
    """Return the address that a text names, with or without a port."""
    host = text[1:].partition("]")[0] if text.startswith("[") else text
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _key_of(address: _Address) -> str:
    if isinstance(address, IPv6Address):
        return str(ip_network((address, _IPV6_CUSTOMER_BITS), strict=False))
    return str(address)
