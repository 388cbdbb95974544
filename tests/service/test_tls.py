"""The service by https: its handshake is bounded as all else of a connection."""

import asyncio
import logging
import os
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import cast

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from gemm_tuner_service.server.connections import ConnectionLimits
from gemm_tuner_service.server.tls import SecuredTransport, TlsFiles
from gemm_tuner_service.settings import Settings
from samples import PROBLEM
from serving import served

from gemm_tuner.errors import InvalidSetting

LIMITS = ConnectionLimits(head_s=0.5, connections=24, backlog=4)
PATIENCE_S = 20
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a certificate of 127.0.0.1, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gemm-tuner")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "certificate.pem"
    file.write_bytes(
        made.public_bytes(Encoding.PEM)
        + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return file


@pytest.fixture
def trusted(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificate)


@pytest.fixture
def secured(
    settings: Settings, certificate: Path, trusted: ssl.SSLContext
) -> Iterator[httpx.Client]:
    tls = TlsFiles(certificate, certificate)
    with served(settings, LIMITS, tls=tls, trusted=trusted) as client:
        yield client


def _connect(client: httpx.Client) -> socket.socket:
    url = client.base_url
    return socket.create_connection((url.host, url.port or 0), timeout=PATIENCE_S)


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller who decides when the bytes of TLS are sent."""

    connection: socket.socket
    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO

    def send(self) -> None:
        self.connection.sendall(self.outgoing.read())

    def receive_to_end(self) -> None:
        while chunk := self.connection.recv(65536):
            self.incoming.write(chunk)


@contextmanager
def _shaken(client: httpx.Client, trusted: ssl.SSLContext) -> Iterator[Caller]:
    """Yield a caller who did not send the end of the handshake yet."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trusted.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with _connect(client) as connection:
        caller = Caller(connection, tls, incoming, outgoing)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                caller.send()
                incoming.write(connection.recv(65536))
        yield caller


def test_a_question_is_answered_by_https(secured: httpx.Client) -> None:
    for _ask in range(3):
        answer = secured.post("/v1/resolve", json={"problem": PROBLEM.text})
        assert answer.json()["verdict"]["decision"] == "tuned"


def test_what_comes_with_the_end_of_the_handshake_is_not_lost(
    secured: httpx.Client, trusted: ssl.SSLContext
) -> None:
    with _shaken(secured, trusted) as caller:
        caller.tls.write(REQUEST)
        caller.send()  # the end of the handshake and the request at once
        caller.receive_to_end()

        assert caller.tls.read(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_handshake_that_does_not_end_is_closed(secured: httpx.Client, sent: bytes) -> None:
    with _connect(secured) as connection:
        connection.sendall(sent)

        try:
            content = connection.recv(65536)
            while connection.recv(65536):
                pass
        except ConnectionResetError:
            content = b""

    assert b"HTTP" not in content


@pytest.mark.proof
def test_unfinished_handshakes_do_not_keep_others_out(secured: httpx.Client) -> None:
    with ExitStack() as stack:
        for _number in range(4 * LIMITS.connections):
            stack.enter_context(_connect(secured))
        answer = secured.get("/healthz")

    assert answer.status_code == 200


def test_who_does_not_end_tls_keeps_no_place(
    settings: Settings, certificate: Path, trusted: ssl.SSLContext
) -> None:
    limits = ConnectionLimits(connections=8, backlog=2)
    tls = TlsFiles(certificate, certificate)
    with served(settings, limits, tls=tls, trusted=trusted) as client, ExitStack() as stack:
        for _number in range(2 * limits.connections):
            connection = stack.enter_context(
                trusted.wrap_socket(_connect(client), server_hostname="127.0.0.1")
            )
            connection.sendall(REQUEST)
            while connection.recv(65536):
                pass
        answer = client.get("/healthz")

    assert answer.status_code == 200


def test_who_ends_tls_behind_a_request_leaves_no_error(
    secured: httpx.Client, trusted: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), _shaken(secured, trusted) as caller:
        caller.send()
        caller.incoming.write(caller.connection.recv(65536))  # the service has done its part
        caller.tls.write(REQUEST)
        with suppress(ssl.SSLWantReadError):
            caller.tls.unwrap()
        caller.send()
        caller.receive_to_end()
        assert secured.get("/healthz").is_success

    assert not caplog.records


class _Held:
    """A transport that holds some bytes, and notes what is done to it."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self.done: list[str] = []

    def get_write_buffer_size(self) -> int:
        return self._size_bytes

    def set_write_buffer_limits(self, high: int) -> None:
        self.done.append(f"limit {high}")

    def is_closing(self) -> bool:
        return "close" in self.done

    def close(self) -> None:
        self.done.append("close")

    def abort(self) -> None:
        self.done.append("abort")


def test_what_the_socket_has_no_room_for_is_unsent() -> None:
    secured, raw = _Held(3), _Held(100_000)
    transport = SecuredTransport(cast("asyncio.Transport", secured), cast("asyncio.Transport", raw))

    assert transport.get_write_buffer_size() == 100_003
    transport.close()
    transport.close()
    assert transport.is_closing()
    transport.abort()

    assert secured.done == ["limit 1", "close"]  # asyncio loses one that is closed twice
    assert raw.done == ["close", "close", "abort"]


def test_the_service_ends_while_a_handshake_is_unfinished(
    settings: Settings, certificate: Path
) -> None:
    trusted = ssl.create_default_context(cafile=certificate)
    limits = ConnectionLimits(head_s=60)
    tls = TlsFiles(certificate, certificate)
    with ExitStack() as stack, served(settings, limits, tls=tls, trusted=trusted) as client:
        stack.enter_context(_connect(client))
        assert client.get("/healthz").is_success


def test_a_certificate_that_cannot_be_used_is_told(tmp_path: Path, certificate: Path) -> None:
    with pytest.raises(InvalidSetting, match="cannot be used"):
        TlsFiles(tmp_path / "missing.pem", certificate).context()
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(InvalidSetting, match="cannot be used"):
        TlsFiles(tmp_path / "empty.pem", certificate).context()


def test_a_pipe_is_no_certificate_and_not_waited_for(tmp_path: Path, certificate: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for files in (TlsFiles(pipe, certificate), TlsFiles(certificate, pipe)):
        with pytest.raises(InvalidSetting, match="pipe is not a plain file"):
            files.context()


def test_a_connection_keeps_little_room_to_read_into() -> None:
    assert SSLProtocol.max_size <= 2**14
