"""A service that is away for a moment is asked again, over one connection that is kept."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import pytest
from relay import Instead, Relay
from served import PROBLEM, Site

from gemm_tuner import Client
from gemm_tuner.build.compile import Build
from gemm_tuner.client.retries import ATTEMPTS, retry_after_s
from gemm_tuner.client.transport import MAX_CONNECTIONS
from gemm_tuner.errors import ServiceFailed, SignatureInvalid
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.runtime.load import Kernel


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize("path", ["/v1/resolve", "/v1/keys"])
def test_what_cannot_be_answered_now_is_asked_again(
    path: str, status: int, site: Site, tmp_path: Path
) -> None:
    busy = Instead(path, status, status)
    with site.serving(around=busy) as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)
    assert busy.asked == 3


def test_a_service_that_stays_busy_is_left_alone_after_a_few_attempts(
    site: Site, tmp_path: Path
) -> None:
    busy = Instead("/v1/resolve", *[503] * 10)
    with site.serving(around=busy) as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "was answered with 503" in kernel.reason
    assert busy.asked == ATTEMPTS


def test_a_download_that_is_refused_for_now_is_tried_again(
    site: Site, build_path: str, tmp_path: Path
) -> None:
    busy = Instead(build_path, 503)
    with site.serving(around=busy) as address:
        assert isinstance(Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM), Kernel)

    assert busy.asked == 2


@pytest.fixture
def build_path(site: Site) -> str:
    trial = site.repository.page(after=0, limit=1).trials[0]
    assert trial.artifact is not None
    return f"/v1/artifacts/sha256/{trial.artifact.sha256}"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refusal_is_not_asked_again(status: int, site: Site, tmp_path: Path) -> None:
    refusing = Instead("/v1/resolve", status)
    with site.serving(around=refusing) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        with pytest.raises(ServiceFailed, match=str(status)):
            client.kernel(PROBLEM)

    assert refusing.asked == 1


def test_a_wrong_signature_is_not_asked_again(site: Site, tmp_path: Path) -> None:
    counting = Instead("/v1/resolve")

    def spoil(path: str, body: bytes) -> bytes:
        return body.replace(b'"signature":"', b'"signature":"AAAA') if "resolve" in path else body

    with site.serving(spoil, around=counting) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        with pytest.raises(SignatureInvalid):
            client.kernel(PROBLEM)

    assert counting.asked == 1


def test_a_busy_service_is_left_alone_for_as_long_as_it_says(site: Site, tmp_path: Path) -> None:
    busy = Instead("/v1/resolve", 429, headers=((b"retry-after", b"1"),))
    with site.serving(around=busy) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        begin_s = time.monotonic()
        kernel = client.kernel(PROBLEM)

    assert isinstance(kernel, Kernel)
    assert time.monotonic() - begin_s >= 1


def test_who_is_told_when_to_come_back_comes_back_as_often(site: Site, tmp_path: Path) -> None:
    busy = Instead("/v1/resolve", *[429] * (ATTEMPTS + 2), headers=((b"retry-after", b"0"),))
    with site.serving(around=busy) as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)
    assert busy.asked == ATTEMPTS + 3


def test_who_is_told_to_come_after_the_deadline_does_not_wait(site: Site, tmp_path: Path) -> None:
    busy = Instead("/v1/resolve", 429, headers=((b"retry-after", b"3600"),))
    with site.serving(around=busy) as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert busy.asked == 1


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("soon", None),
        ("-1", None),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 0.0),
        ("٣", None),
        ("1 Jan 99999999999 00:00:00 GMT", None),
        ("Fri, 31 Dec 9999 23:59:59 -9999", None),
        ("9" * 400, inf),
    ],
)
def test_the_time_to_come_back_is_understood(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header) == seconds


def test_a_connection_that_is_dropped_is_made_again(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        relay = Relay(target_port=_port_of(address), drops=ATTEMPTS - 1)
        with relay.relaying() as relayed:
            kernel = Client(relayed, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)
    assert relay.connections == ATTEMPTS


def test_a_network_that_is_cut_within_a_download_ends_at_the_deadline(
    site: Site, build: Build, tmp_path: Path
) -> None:
    most_bytes = 8192  # of answers: enough for keys and verdict, not for the kernel
    assert len(build.binary) > most_bytes
    with site.serving() as address:
        relay = Relay(target_port=_port_of(address), most_bytes=most_bytes)
        with relay.relaying() as relayed:
            client = Client(relayed, cache_dir=tmp_path / "cache", timeout_s=1)
            begin_s = time.monotonic()
            kernel = client.kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert time.monotonic() - begin_s < 60  # and nothing else would end it
    assert not list((tmp_path / "cache" / "artifacts").iterdir())


def test_one_connection_serves_one_ask_after_the_other(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        relay = Relay(target_port=_port_of(address))
        with relay.relaying() as relayed:
            client = Client(relayed, cache_dir=tmp_path / "cache")
            for problem in (PROBLEM, "f32 1x2x3", "f32 1x2x4"):
                client.kernel(problem)
            assert relay.connections == 1

            relay.cut()
            client.resolve(PROBLEM)

    assert relay.connections == 2


def test_threads_share_a_few_connections(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        relay = Relay(target_port=_port_of(address))
        with relay.relaying() as relayed:
            client = Client(relayed, cache_dir=tmp_path / "cache")
            problems = [f"f32 1x2x{k}" for k in range(1, 25)]
            with ThreadPoolExecutor(12) as pool:
                answers = list(pool.map(client.resolve, problems))

    assert [answer.verdict.problem for answer in answers] == [f"{one} nk none" for one in problems]
    assert relay.connections <= MAX_CONNECTIONS


def test_a_forked_child_has_a_connection_of_its_own(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        relay = Relay(target_port=_port_of(address))
        with relay.relaying() as relayed:
            client = Client(relayed, cache_dir=tmp_path / "cache")
            client.kernel(PROBLEM)

            code = _in_child(
                lambda: client.resolve("f32 1x2x3").verdict.problem == "f32 1x2x3 nk none"
            )
            client.resolve("f32 1x2x4")

    assert code == 0
    assert relay.connections == 2


def _in_child(check: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
