"""What Dask is asked for: that a task is run, and nothing of what comes back."""

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from certificates import make_identity
from working import wait_until

from gemm_tuner.fleet.engine import DaskEngine, resources_of
from gemm_tuner.fleet.library import SchedulerUnreachable, greet
from gemm_tuner.fleet.scheduler import Scheduler

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(
        find_spec("distributed") is None, reason='the extra "fleet" is not installed'
    ),
]

# A process of its own, at whose end Dask does not wait for what it has begun.
_CONNECT = """
import os, sys
from gemm_tuner.errors import MissingCapability
from gemm_tuner.fleet import engine, library
from gemm_tuner.fleet.scheduler import Scheduler
engine.TIMEOUT_S = library.TIMEOUT_S = 2.0
try:
    engine.DaskEngine(Scheduler(address=sys.argv[1]), print)
except MissingCapability as error:
    print(error, flush=True)
os._exit(0)
"""
_RUN: list[str] = []
_READ: list[str] = []


class Foreign:
    """What a worker returns that means harm: whoever reads it runs something."""

    def __reduce__(self) -> tuple[object, ...]:
        return _READ.append, ("read",)


def harm(job_id: str) -> Foreign:
    _RUN.append(job_id)
    return Foreign()


@pytest.mark.parametrize("content", [bytes(10_000), b""], ids=["other bytes", "silence"])
def test_something_else_at_the_address_is_no_scheduler(content: bytes) -> None:
    """It sends what no scheduler sends, at which Dask's own errors are of any kind, or nothing."""
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _address = listener.accept()
                    connections.append(connection)
                    connection.sendall(content)

        threading.Thread(target=answer, daemon=True).start()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"

        command = [sys.executable, "-c", _CONNECT, address]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)

    assert f"the scheduler {address} does not answer (" in done.stdout, done.stderr


def test_a_scheduler_of_another_authority_is_refused_with_the_reason(tmp_path: Path) -> None:
    own, other = (make_identity(tmp_path / name) for name in ("own", "other"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(other.certificate, other.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _address = listener.accept()
                    with suppress(OSError):  # it is refused
                        context.wrap_socket(connection, server_side=True).close()

        threading.Thread(target=answer, daemon=True).start()
        scheduler = Scheduler(address=f"tls://127.0.0.1:{listener.getsockname()[1]}", tls=own)

        with pytest.raises(SchedulerUnreachable, match=r"answer \(TLS certificate does not match"):
            asyncio.run(greet(scheduler))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Scheduler]:
    import distributed  # noqa: PLC0415 - what collects tests need not load it

    with distributed.LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address=None,
        worker_dashboard_address=None,
        resources=resources_of("a"),
    ) as cluster:
        yield Scheduler(address=cluster.scheduler_address)


def test_what_a_task_returns_is_not_read(fleet: Scheduler) -> None:
    engine = DaskEngine(fleet, print)
    assert engine.places() == {"a": 1}

    placed = engine.place(harm, "0" * 32, class_key="a")
    wait_until(placed.done)
    elsewhere = engine.place(harm, "1" * 32, class_key="a", names=["nobody"])
    engine.close()

    assert _RUN == ["0" * 32]
    assert not _READ
    assert elsewhere.done()


def test_other_versions_in_the_fleet_are_told_once(
    fleet: Scheduler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import distributed  # noqa: PLC0415 - what collects tests need not load it

    def with_another_msgpack() -> dict[str, dict[str, object]]:
        facts: dict[str, dict[str, object]] = versions.get_versions()
        return facts | {"packages": facts["packages"] | {"msgpack": "0.1"}}

    versions = distributed.versions
    found = versions.get_versions()["packages"]["msgpack"]
    of_client = SimpleNamespace(
        get_versions=with_another_msgpack,
        VersionMismatchWarning=versions.VersionMismatchWarning,
    )
    monkeypatch.setattr(distributed.client, "version_module", of_client)
    told: list[str] = []

    for _again in range(2):
        DaskEngine(fleet, told.append).close()

    [line] = told
    assert f"(msgpack 0.1 here, {found} at the scheduler, {found} at workers)" in line
    assert "install the same versions" in line
    assert capsys.readouterr() == ("", "")
