import os
from typing import Any

import pytest
from gemm_tuner_service.clients.peers import UID, Peer, Proxies

from gemm_tuner.errors import InvalidSetting


def peer(
    address: str | None, *proxies: str, scheme: str = "http", uid: int | None = None, **headers: str
) -> Peer:
    """Return where a request comes from, given the names of its headers with underscores."""
    scope: dict[str, Any] = {
        "client": None if address is None else (address, 1),
        "scheme": scheme,
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ],
        "state": {} if uid is None else {UID: uid},
    }
    return Proxies.parse(proxies).peer_of(scope)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False)],
)
def test_loopback_is_known_in_all_its_forms(host: str, is_loopback: bool) -> None:  # noqa: FBT001
    found = peer(host)

    assert found.is_loopback == is_loopback
    assert found.is_private == is_loopback


@pytest.mark.parametrize(
    ("asked", "is_loopback"),
    [
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("LOCALHOST:8000", True),
        ("tuner.localhost.", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_a_site_that_leads_a_browser_here_is_no_user_of_this_machine(
    asked: str,
    is_loopback: bool,  # noqa: FBT001
) -> None:
    assert peer("127.0.0.1", host=asked).is_loopback == is_loopback
    assert peer("127.0.0.1", host=asked).is_private


def test_encryption_makes_any_way_private() -> None:
    assert peer("10.0.0.1", scheme="https").is_private
    assert not peer("10.0.0.1", scheme="https").is_loopback


def test_a_named_proxy_is_believed() -> None:
    found = peer(
        "10.0.0.9", "10.0.0.0/24", x_forwarded_for="203.0.113.7", x_forwarded_proto="https"
    )

    assert (found.key, found.is_private, found.is_loopback) == ("203.0.113.7", True, False)


def test_what_a_caller_writes_before_the_proxy_is_not_believed() -> None:
    found = peer(
        "10.0.0.9", "10.0.0.9", "10.0.0.8", x_forwarded_for="127.0.0.1, 203.0.113.7, 10.0.0.8"
    )

    assert found.key == "203.0.113.7"
    assert not found.is_loopback


@pytest.mark.parametrize("value", ["", "unknown", "127.0.0.1", "10.0.0.9", "; DROP", "1.2.3.4, x"])
def test_no_header_makes_a_caller_behind_a_proxy_local(value: str) -> None:
    found = peer("127.0.0.1", "127.0.0.1", "10.0.0.9", x_forwarded_for=value)

    assert not found.is_loopback
    assert not found.is_local_user
    assert not found.is_private


def test_a_header_of_a_stranger_changes_nothing() -> None:
    found = peer("198.51.100.1", "10.0.0.9", x_forwarded_for="203.0.113.7")

    assert found.key == "198.51.100.1"


def test_two_answers_of_proxies_on_the_scheme_are_none() -> None:
    found = peer(
        "10.0.0.9", "10.0.0.9", x_forwarded_for="203.0.113.7", x_forwarded_proto="https, http"
    )

    assert not found.is_private


def test_a_socket_knows_its_user_unless_a_proxy_sits_there() -> None:
    own = os.getuid()
    for uid in (own, 0):
        assert peer(None, uid=uid).is_local_user
        assert peer(None, uid=uid).key == f"uid {uid}"
    assert not peer(None, "unix", uid=own).is_local_user
    assert peer(None, "unix", uid=own, x_forwarded_for="203.0.113.7").key == "203.0.113.7"


def test_another_user_at_the_socket_is_as_one_on_loopback() -> None:
    found = peer(None, uid=os.getuid() + 1)

    assert (found.is_local_user, found.is_loopback, found.is_private) == (False, True, True)


def test_the_addresses_of_one_ipv6_customer_are_one_client() -> None:
    assert peer("2001:db8::1").key == peer("2001:db8::2").key == "2001:db8::/64"
    assert peer("2001:db8:0:1::1").key != peer("2001:db8::1").key


@pytest.mark.parametrize("text", ["", "proxy", "10.0.0.1/33", "10.0.0.1/8", "http://10.0.0.1"])
def test_a_proxy_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="proxy is not understood"):
        Proxies.parse([text])
