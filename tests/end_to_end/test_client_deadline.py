"""An ask ends, however slowly a service answers."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import PROBLEM

from gemm_tuner import Client
from gemm_tuner.libraries.fallback import FallbackKernel

PATIENCE_S = 60.0  # and the answer takes hours
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"


class SlowService:
    """Takes every connection, sends what it is told at once, and then a byte now and then."""

    def __init__(self, at_once: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._at_once = at_once
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._is_over.set()
        self._listener.close()
        self._thread.join(5)

    def _answer(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            try:
                connection.sendall(self._at_once)
                while not self._is_over.wait(0.02):
                    connection.sendall(b"x")
            except OSError:
                pass


@pytest.fixture(params=[b"HTTP/1.1 200 OK\r\nX-Slow: ", HEAD], ids=["headers", "body"])
def slow_service(request: pytest.FixtureRequest) -> Iterator[SlowService]:
    service = SlowService(request.param)
    yield service
    service.close()


def test_a_slow_answer_ends_at_the_deadline_and_falls_back(
    slow_service: SlowService, tmp_path: Path
) -> None:
    client = Client(slow_service.address, cache_dir=tmp_path / "cache", timeout_s=0.3)

    begin_s = time.monotonic()
    kernel = client.kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert time.monotonic() - begin_s < PATIENCE_S
    assert "does not answer" in kernel.reason


def test_a_port_that_accepts_and_says_nothing_ends_at_the_deadline(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        kernel = Client(address, cache_dir=tmp_path / "cache", timeout_s=0.2).kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "does not answer" in kernel.reason
