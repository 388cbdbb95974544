"""A fleet on one machine: who misses a kernel gets it tuned by a worker that has their CPU.

    pip install "gemm-tuner[all,fleet,postgres]" && apt install postgresql
    python examples/fleet.py

It starts PostgreSQL, a scheduler of Dask, the service, and two workers with CPUs of different
classes: the second one is simulated, by fewer features. A client with the second one's CPU asks for
a kernel that nobody tuned. All lives in a temporary folder, speaks TLS with certificates of both
sides, and takes one to three minutes. docs/fleet.md does the same on several machines.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from gemm_tuner import Client
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.domain.job import JobState
from gemm_tuner.domain.problem import Problem
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.sql.database import open_database

PROBLEM = Problem.parse("f32 4x16x16 nk bias+relu")
FEWER = "avx2,fma"  # the features of the simulated CPU
ENDING = ("setpriv", "--pdeathsig=INT")  # of processes, with this one
PATIENCE_S = 60.0
TUNING_S = 150.0


class Parts:
    """The processes of the fleet, each with its log in a folder; they end with the context."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack

    def start(self, name: str, *command: str, **variables: str) -> None:
        """Start a process, which the system ends with this one at the latest."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*ENDING, *command],
                env={**os.environ, **variables},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._stack.callback(process.wait)
        # All of them stop in order by SIGINT; by SIGTERM, PostgreSQL would wait for its clients.
        self._stack.callback(process.send_signal, signal.SIGINT)

    def said(self, name: str) -> str:
        """Return what a process has said."""
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name: str, text: str) -> str:
        """Return the line in which a process says something, once it does."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            for line in self.said(name).splitlines():
                if text in line:
                    return line
            time.sleep(0.1)
        sys.exit(f"{name} is not up after {PATIENCE_S:g} s; it said:\n{self.said(name)}")


def tell(text: str) -> None:
    """Print what happens, with the seconds since the start."""
    print(f"{time.monotonic() - BEGAN_S:5.1f} s  {text}", flush=True)


def main() -> None:
    """Start all parts, ask for a kernel, and call it."""
    with TemporaryDirectory(prefix="gemm-tuner-fleet-") as name, ExitStack() as stack:
        folder = Path(name)
        parts = Parts(folder, stack)
        url = start_postgres(parts)
        joining = start_scheduler(parts)
        start_service(parts, url)
        start_workers(parts, url, joining)
        # From here on this process is a client, on a machine of the second class.
        os.environ["GEMM_TUNER_ISA"] = FEWER
        os.environ["XDG_DATA_HOME"] = str(folder / "client")
        ask_and_call(parts, url)


def start_postgres(parts: Parts) -> str:
    """Start PostgreSQL with a new database, and return its URL."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: int(one.parts[4]))
    if not found:
        sys.exit("PostgreSQL is not installed; apt install postgresql.")
    programs, data = found[-1], parts.folder / "postgres"
    data.mkdir()
    other: tuple[str, ...] = ()
    if os.getuid() == 0:  # it refuses to run as root
        parts.folder.chmod(0o755)
        shutil.chown(data, "postgres", "postgres")
        other = ("--reuid=postgres", "--regid=postgres", "--clear-groups")
    prefix = ("setpriv", *other) if other else ()
    cluster = data / "cluster"
    initdb = (str(programs / "initdb"), "--username=tuner", "--auth=trust", "--no-sync")
    made = subprocess.run(
        [*prefix, *initdb, str(cluster)], cwd=data, capture_output=True, text=True, check=False
    )
    if made.returncode:
        sys.exit(f"initdb failed: {made.stderr}")
    settings = ("-c", "listen_addresses=", "-c", f"unix_socket_directories={data}")
    parts.start("postgres", *other, str(programs / "postgres"), "-D", str(cluster), *settings)
    parts.wait_for("postgres", "ready to accept connections")
    subprocess.run(
        [str(programs / "createdb"), "--host", str(data), "--username", "tuner", "gemm_tuner"],
        check=True,
    )
    tell("PostgreSQL is up: the database holds the truth, jobs and trials")
    return f"postgresql://tuner@/gemm_tuner?host={data}"


def start_scheduler(parts: Parts) -> tuple[str, ...]:
    """Start the scheduler of Dask; return the options by which commands speak to it."""
    make_certificates(parts.folder)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tls://127.0.0.1:{listener.getsockname()[1]}"
    files = {name: str(parts.folder / f"{name}.pem") for name in ("ca", "cert", "key")}
    parts.start(
        "scheduler",
        *(sys.executable, "-c", "from distributed.cli.dask_scheduler import main; main()"),
        *("--host", address, "--no-dashboard", "--dashboard-address", "127.0.0.1:0"),
        *("--tls-ca-file", files["ca"], "--tls-cert", files["cert"], "--tls-key", files["key"]),
    )
    parts.wait_for("scheduler", "Scheduler at")
    tell(f"a scheduler of Dask is up at {address}; who has no certificate is not spoken to")
    tls = ("--tls-ca", files["ca"], "--tls-cert", files["cert"], "--tls-key", files["key"])
    return ("--scheduler", address, *tls)


def start_service(parts: Parts, url: str) -> None:
    """Start the service, with no worker beside it."""
    where = ("--socket", str(parts.folder / "service.sock"), "--workers", "0")
    data = str(parts.folder / "service")
    parts.start("service", *command("serve"), *where, GEMM_TUNER_DB=url, XDG_DATA_HOME=data)
    parts.wait_for("service", "Serving at")
    tell("the service is up, without a worker of its own")


def start_workers(parts: Parts, url: str, joining: tuple[str, ...]) -> None:
    """Start the two workers, and what places jobs on them."""
    variables = {"GEMM_TUNER_DB": url, "XDG_DATA_HOME": str(parts.folder / "workers")}
    parts.start("dispatcher", *command("dispatch"), *joining, **variables)
    for name, features in (("first worker", None), ("second worker", FEWER)):
        narrowed = {} if features is None else {"GEMM_TUNER_ISA": features}
        parts.start(name, *command("worker"), *joining, **variables, **narrowed)
    for name in ("first worker", "second worker"):
        parts.wait_for(name, "belongs to the fleet")
        waits = parts.wait_for(name, "waits for jobs for")
        class_key = waits.partition(" for jobs for ")[2].partition(";")[0]
        tell(f"the {name} has joined, for CPUs {class_key}")
    attests = parts.wait_for("first worker", "attests what it measures with the key")
    public_key = attests.split()[-1].rstrip(".")
    run("keys", "accept", public_key, XDG_DATA_HOME=str(parts.folder / "service"))
    tell(f"the service believes what they measure: their measuring key {public_key[:16]}...")


def ask_and_call(parts: Parts, url: str) -> None:
    """Ask for a kernel that nobody tuned, and check and call what comes."""
    client = Client(f"unix:{parts.folder / 'service.sock'}", cache_dir=parts.folder / "cache")
    missed = client.kernel(PROBLEM)
    assert isinstance(missed, FallbackKernel)
    tell(f"a client with a CPU {detect_cpu().class_key} asks for {PROBLEM.text}:")
    tell(f"  missed; {missed.library} computes: {missed.reason}")
    kernel = client.kernel(PROBLEM, tune="wait", tune_timeout_s=TUNING_S)

    (job,) = Jobs(open_database(url)).newest(10)
    tell(f"job {job.id[:8]} for {job.class_key} is {job.state.value}: {job.detail}")
    ran = [one for one in ("first worker", "second worker") if job.id[:8] in parts.said(one)]
    tell(f"  it was run by: {', '.join(ran) or 'nobody'}")
    if job.state is not JobState.DONE or ran != ["second worker"]:
        sys.exit(f"The job was not done; the second worker said:\n{parts.said('second worker')}")
    if isinstance(kernel, FallbackKernel):  # a disturbed machine may show no kernel as faster
        tell(f"no kernel was shown to be faster, so {kernel.library} goes on: {kernel.reason}")
    else:
        tell(f"served: {kernel.candidate.text}, sha256 {kernel.artifact.sha256[:12]}")

    inputs = make_inputs(PROBLEM, InputKind.NORMAL, 1)
    packed = kernel.pack(inputs.w)
    operands: dict[str, Any] = {**inputs.operands}
    y = np.empty((PROBLEM.m.high, PROBLEM.n), np.float32)
    kernel(inputs.x, packed, out=y, **operands)
    fault = find_error(compute_expected(PROBLEM, inputs), y)
    if fault is not None:
        sys.exit(f"The result is wrong: {fault}")
    tell("called, and checked against float64: every element is within its error bound")


def make_certificates(folder: Path) -> None:
    """Write an authority, and a certificate that it signed with its key: ca, cert and key.pem."""
    authority_key, own_key = (ec.generate_private_key(ec.SECP256R1()) for _key in range(2))
    authority, now = _name("authority of the fleet"), datetime.now(UTC)
    for file, subject, key, is_ca in (
        ("ca", authority, authority_key, True),
        ("cert", _name("fleet"), own_key, False),
    ):
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .sign(authority_key, SHA256())
        )
        (folder / f"{file}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    private = os.open(folder / "key.pem", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(private, "wb") as out:
        out.write(own_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def command(name: str) -> tuple[str, ...]:
    """Return a command of gemm-tuner."""
    return (sys.executable, "-m", "gemm_tuner", name)


def run(name: str, *arguments: str, **variables: str) -> str:
    """Run a command of gemm-tuner to its end, and return what it prints."""
    environment: Mapping[str, str] = {**os.environ, **variables}
    done = subprocess.run(
        [*command(name), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"gemm-tuner {name} failed: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    BEGAN_S = time.monotonic()
    main()
