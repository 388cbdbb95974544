"""Attack a service on this machine for some seconds, and print what an honest caller notices.

    python benchmarks/attack_service.py

A service with `ulimit -n 1024` and a new database is started on a free port of the loopback
interface. For each attack, a table row says how long an honest caller then waits for /healthz and
for a verdict, and what memory, file descriptors and log the service has. It exits with 1 if an
honest caller gets no answer, or /healthz takes longer than a second, or memory or log exceed
300 MB and 1 MB.
"""

import argparse
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

DESCRIPTORS = 1024
MAX_HEALTH_S = 1.0
MAX_MEMORY_KIB = 300_000_000 // 1024
MAX_LOG_BYTES = 1_000_000
PATIENCE_S = 30.0
POST = b"POST /v1/resolve HTTP/1.1\r\nHost: localhost\r\n"
# name, connections, what each sends and then no more
ATTACKS: Sequence[tuple[str, int, bytes]] = (
    ("half-sent headers", 1500, POST + b"X-Slow: "),
    ("idle connections", 1500, b""),
    ("unfinished bodies", 300, POST + b"Content-Length: 1048576\r\n\r\n" + b"x" * 1_000_000),
    ("many small headers", 500, POST + b"X:\r\n" * 100_000),
    ("blanks in a header", 500, POST + b"X:" + b" " * 200_000 + b"\0\r\n\r\n"),
    ("answers nobody reads", 100, b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200),
    ("many requests at once", 500, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000),
    ("a chunk without end", 500, POST + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 500_000),
    ("no HTTP", 1500, b"\0\r\n\r\n"),
    (
        "upgrades",
        500,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    ),
)


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    address: str
    pid: int
    log: Path

    def check(self, attack: str) -> bool:
        """Print a row, and return whether it is within bounds."""
        # From another address: who floods a service is another client.
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=self.address, timeout=PATIENCE_S, transport=elsewhere) as caller:
            begin_s = time.monotonic()
            is_well = caller.get("/healthz").is_success
            health_s = time.monotonic() - begin_s
            begin_s = time.monotonic()
            is_well &= caller.post("/v1/resolve", json={"problem": "f32 8x8x8"}).is_success
            resolve_s = time.monotonic() - begin_s
        status = Path(f"/proc/{self.pid}/status").read_text()
        memory_kib = int(status.partition("VmRSS:")[2].split()[0])
        descriptors = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
        log_bytes = self.log.stat().st_size
        sys.stdout.write(
            f"{attack:20} {health_s * 1e3:7.0f} ms {resolve_s * 1e3:7.0f} ms "
            f"{memory_kib / 1024:7.0f} MiB {descriptors:6} {log_bytes:8} B\n"
        )
        is_bounded = memory_kib <= MAX_MEMORY_KIB and log_bytes <= MAX_LOG_BYTES
        return is_well and is_bounded and health_s <= MAX_HEALTH_S


def main(arguments: Sequence[str] | None = None) -> int:
    """Run each attack, and return the exit code."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(arguments)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    names = ("attack", "healthz", "resolve", "memory", "files", "log")
    sys.stdout.write("{:20} {:>10} {:>10} {:>11} {:>6} {:>10}\n".format(*names))
    with service() as one:
        are_bounded = [one.check("none")]
        for name, count, sent in ATTACKS:
            with ExitStack() as connections:
                for _number in range(count):
                    connections.enter_context(attack(one.address, sent))
                are_bounded.append(one.check(name))
    return 0 if all(are_bounded) else 1


@contextmanager
def service() -> Iterator[Service]:
    """Run a service with few file descriptors, and end it."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stream:
            child = subprocess.Popen(
                [sys.executable, "-m", "gemm_tuner", "serve", "--port", "0", "--workers", "0"],
                env={**os.environ, "XDG_DATA_HOME": folder, "GEMM_TUNER_DB": ""},
                stderr=stream,
                preexec_fn=limit_descriptors,  # noqa: PLW1509 - no threads here
            )
        try:
            yield Service(address_in(log), child.pid, log)
        finally:
            child.terminate()
            child.wait(PATIENCE_S)


def limit_descriptors() -> None:
    """Lower what this process may open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


def address_in(log: Path) -> str:
    """Return the address that the service says."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        said = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if said is not None:
            return said[0]
        time.sleep(0.1)
    raise SystemExit(f"the service did not start: {log.read_text()}")


def attack(address: str, sent: bytes) -> socket.socket:
    """Return a connection on which `sent` was sent, as far as the service took it."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    with suppress(OSError):
        connection.sendall(sent)
    return connection


if __name__ == "__main__":
    sys.exit(main())
