"""A service of several processes at one address."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from gemm_tuner_service.metrics import FOLDER_VARIABLE
from gemm_tuner_service.server.run import folder_of_numbers
from prometheus_client.parser import text_string_to_metric_families
from served import PROBLEM, Site

from gemm_tuner.build.compile import Build
from gemm_tuner.cli.main import run

PATIENCE_S = 60.0


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _processes_of(parent: int) -> set[int]:
    """Return those that answer, without the process that Python starts beside them."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return {int(child) for child in children if b"spawn_main" in _command_of(child)}


def _command_of(process: str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Service:
    """A service of two processes, and its address."""

    def __init__(self, child: "subprocess.Popen[str]", address: str) -> None:
        self.child = child
        self.address = address

    @property
    def pids(self) -> set[int]:
        return _processes_of(self.child.pid)

    def answered(self) -> float:
        """Return how many requests for its health all processes have answered."""
        text = httpx.get(f"{self.address}/metrics", timeout=PATIENCE_S, trust_env=False).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "gemm_tuner_requests_total" and sample.labels["route"] == "/healthz"
        )

    def ask_each(self) -> None:
        """Ask on connections of their own, until each process has answered."""
        for _ask in range(40):
            self.ask()

    def ask(self) -> httpx.Response:
        return httpx.get(f"{self.address}/healthz", timeout=PATIENCE_S, trust_env=False)

    def decision(self) -> object:
        """Return what a new connection is told about the problem of the store."""
        question = {"problem": PROBLEM.text}
        url = f"{self.address}/v1/resolve"
        answer = httpx.post(url, json=question, timeout=PATIENCE_S, trust_env=False)
        return answer.raise_for_status().json()["verdict"]["decision"]


@pytest.fixture
def service(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    options = ["--port", "0", "--db", site.settings.database_url, "--key", str(tmp_path / "k.pem")]
    with subprocess.Popen(
        [sys.executable, "-m", "gemm_tuner", "serve", "--processes", "2", *options],
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stderr is not None
            service = Service(child, child.stderr.readline().split()[2].rstrip(";"))
            _wait_until(lambda: len(service.pids) == 2)
            yield service
        finally:
            child.terminate()


def test_all_processes_answer_and_their_numbers_are_added_up(service: Service) -> None:
    service.ask_each()

    _wait_until(lambda: service.answered() == 40)


@pytest.mark.proof
def test_a_process_that_was_killed_is_replaced(service: Service) -> None:
    service.ask_each()
    before = service.pids
    victim = min(before)

    os.kill(victim, signal.SIGKILL)
    _wait_until(lambda: len(service.pids - {victim}) == 2)

    assert service.ask().json() == {"status": "ok"}
    assert len(service.pids & before) == 1


@pytest.mark.proof
def test_a_change_in_the_database_is_seen_by_every_process(
    service: Service, site: Site, build: Build
) -> None:
    assert {service.decision() for _ask in range(20)} == {"tuned"}

    revoked = ["revoke", build.artifact.sha256, "--reason", "a test"]
    assert run([*revoked, "--db", site.settings.database_url]) == 0

    _wait_until(lambda: all(service.decision() != "tuned" for _ask in range(20)))


@pytest.mark.proof
def test_a_hangup_replaces_all_processes(service: Service) -> None:
    before = service.pids

    service.child.send_signal(signal.SIGHUP)
    _wait_until(lambda: len(service.pids) == 2 and not service.pids & before)

    assert service.ask().json() == {"status": "ok"}


def test_without_a_folder_for_numbers_it_says_so(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_options: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    options = ["--port", "0", "--db", site.settings.database_url, "--key", str(tmp_path / "k.pem")]

    assert run(["serve", "--processes", "2", *options]) != 0

    assert f"name a writable one in TMPDIR or {FOLDER_VARIABLE}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "way",
    [
        signal.SIGTERM,
        *(pytest.param(one, marks=pytest.mark.proof) for one in (signal.SIGINT, signal.SIGKILL)),
    ],
)
def test_no_process_is_left(service: Service, way: signal.Signals) -> None:
    pids = service.pids

    service.child.send_signal(way)
    code = service.child.wait(PATIENCE_S)

    assert code == (0 if way is not signal.SIGKILL else -signal.SIGKILL)
    _wait_until(lambda: not any(_is_alive(pid) for pid in pids))
    with suppress(httpx.TransportError):
        service.ask()
        pytest.fail("somebody still answers")


def test_what_a_killed_service_left_is_removed_and_what_is_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dying = (
        "import os; from gemm_tuner_service.server.run import folder_of_numbers as f\n"
        "with f(): os._exit(0)"
    )
    subprocess.run(
        [sys.executable, "-c", dying], env={**os.environ, "TMPDIR": str(tmp_path)}, check=True
    )
    (left,) = tmp_path.iterdir()

    with folder_of_numbers():
        used = Path(os.environ.pop(FOLDER_VARIABLE))
        with folder_of_numbers():
            assert not left.exists()
            assert used.exists()
        os.environ[FOLDER_VARIABLE] = str(used)

    assert not list(tmp_path.iterdir())


def test_the_number_of_processes_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--processes", "0"]) == 2
    assert "--processes" in capsys.readouterr().err
