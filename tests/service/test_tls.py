"""The service by https: its handshake is bounded as all else of a connection."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from gemm_tuner_service.connections import ConnectionLimits
from gemm_tuner_service.settings import Settings
from gemm_tuner_service.tls import TlsFiles
from samples import PROBLEM
from serving import served

from gemm_tuner.errors import InvalidSetting

LIMITS = ConnectionLimits(head_s=0.5, connections=24, backlog=4)
PATIENCE_S = 20


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
def secured(settings: Settings, certificate: Path) -> Iterator[httpx.Client]:
    trusted = ssl.create_default_context(cafile=certificate)
    tls = TlsFiles(certificate, certificate)
    with served(settings, LIMITS, tls=tls, trusted=trusted) as client:
        yield client


def _connect(client: httpx.Client) -> socket.socket:
    url = client.base_url
    return socket.create_connection((url.host, url.port or 0), timeout=PATIENCE_S)


def test_a_question_is_answered_by_https(secured: httpx.Client) -> None:
    for _ask in range(3):
        answer = secured.post("/v1/resolve", json={"problem": PROBLEM.text})
        assert answer.json()["verdict"]["decision"] == "tuned"


def test_what_comes_with_the_end_of_the_handshake_is_not_lost(
    secured: httpx.Client, certificate: Path
) -> None:
    trusted = ssl.create_default_context(cafile=certificate)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    shaking = trusted.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with _connect(secured) as connection:
        while True:
            try:
                shaking.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))
        shaking.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        connection.sendall(outgoing.read())  # the end of the handshake and the request at once
        while chunk := connection.recv(65536):
            incoming.write(chunk)

    assert shaking.read(65536).startswith(b"HTTP/1.1 200")


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


def test_unfinished_handshakes_do_not_keep_others_out(secured: httpx.Client) -> None:
    with ExitStack() as stack:
        for _number in range(4 * LIMITS.connections):
            stack.enter_context(_connect(secured))
        answer = secured.get("/healthz")

    assert answer.status_code == 200


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
