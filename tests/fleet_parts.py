"""The parts of a fleet as processes, each of which a test may kill and start again."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from working import wait_until

from gemm_tuner.fleet.scheduler import TlsIdentity
from gemm_tuner.trust.attestation import MeasuringKeys

CALMED = Path(__file__).with_name("calmed")

_ENDING = ("setpriv", "--pdeathsig=KILL")  # with the process that started it


@dataclass
class Part:
    """A process of a fleet, which ends with the test at the latest."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Start it, unless it runs."""
        if self.is_running:
            return
        with self.log.open("ab") as stream:
            self._process = subprocess.Popen(
                [*_ENDING, *self.command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it by a signal, and wait for its end."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()

    @property
    def is_running(self) -> bool:
        """Return whether it was started and did not end."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Return the id of its process."""
        assert self._process is not None
        return self._process.pid

    def said(self) -> str:
        """Return all that it has said."""
        return self.log.read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until it has said something so often."""
        wait_until(lambda: self.said().count(text) >= times)


@dataclass(frozen=True, kw_only=True)
class FleetParts:
    """How the parts of a fleet on this machine are started: all in one folder, on one database."""

    folder: Path
    database_url: str
    tls: TlsIdentity | None = None
    lease_s: float = 60.0
    port: int = field(init=False)

    def __post_init__(self) -> None:
        """Choose a port."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            object.__setattr__(self, "port", listener.getsockname()[1])

    @property
    def address(self) -> str:
        """Return the address of the scheduler."""
        return f"{'tls' if self.tls else 'tcp'}://127.0.0.1:{self.port}"

    @property
    def joining(self) -> tuple[str, ...]:
        """Return the options by which a command of ours speaks to the scheduler."""
        options = ("--scheduler", self.address)
        if self.tls is None:
            return options
        files = (self.tls.authority, self.tls.certificate, self.tls.key)
        names = ("--tls-ca", "--tls-cert", "--tls-key")
        given = (str(one) for pair in zip(names, files, strict=True) for one in pair)
        return (*options, *given)

    def scheduler(self) -> Part:
        """Return the scheduler, as `dask scheduler` starts it."""
        options = ["--host", self.address, "--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
        if self.tls is not None:
            options += ["--tls-ca-file", str(self.tls.authority)]
            options += ["--tls-cert", str(self.tls.certificate), "--tls-key", str(self.tls.key)]
        run = "from distributed.cli.dask_scheduler import main; main()"
        return self._part("scheduler", (sys.executable, "-P", "-c", run, *options))

    def worker(self, name: str, **variables: str) -> Part:
        """Return a worker with a data directory of its own, as on a machine of its own.

        Its measuring key is believed here.
        """
        data = self.data_of(name)
        MeasuringKeys().accept(MeasuringKeys(data / "gemm-tuner").own_made())
        variables = {"XDG_DATA_HOME": str(data), **variables}
        return self._command(name, "worker", *self.joining, **variables)

    def data_of(self, name: str) -> Path:
        """Return the data directory of a worker."""
        return self.folder / f"data-{name}"

    def dispatcher(self) -> Part:
        """Return the dispatcher."""
        return self._command("dispatcher", "dispatch", *self.joining)

    def service(self) -> Part:
        """Return the service, at a Unix socket, with no worker beside it."""
        where = ("--socket", str(self.socket_path), "--key", str(self.folder / "signing.pem"))
        return self._command("service", "serve", *where, "--workers", "0")

    @property
    def socket_path(self) -> Path:
        """Return the socket of the service."""
        return self.folder / "service.sock"

    def sweep(self, *arguments: str) -> Part:
        """Return a sweep over the fleet."""
        return self._command("sweep", "sweep", *arguments, *self.joining)

    def _command(self, name: str, *arguments: str, **variables: str) -> Part:
        return self._part(name, (sys.executable, "-m", "gemm_tuner", *arguments), **variables)

    def _part(self, name: str, command: tuple[str, ...], **variables: str) -> Part:
        path = os.pathsep.join(filter(None, (str(CALMED), os.environ.get("PYTHONPATH"))))
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "CALMED_LEASE_S": str(self.lease_s),
            "PYTHONUNBUFFERED": "1",
            "GEMM_TUNER_DB": self.database_url,
            **variables,
        }
        return Part(name, command, environment, self.folder / f"{name}.log")
