"""`gemm-tuner serve`: run the service on this machine. The only module that knows it."""

import signal
import socket
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Annotated

import typer
from gemm_tuner_service.clients.client_limits import PER_SECOND
from gemm_tuner_service.clients.peers import Proxies
from gemm_tuner_service.server.listening import (
    is_reachable_from_elsewhere,
    listen_on_port,
    listen_on_socket,
    url_of,
)
from gemm_tuner_service.server.run import run_service
from gemm_tuner_service.server.tls import TlsFiles
from gemm_tuner_service.settings import Settings
from sqlalchemy import Engine

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.places import check_no_database
from gemm_tuner.cli.terminal.output import print_message
from gemm_tuner.cli.terminal.progress_line import ProgressLine, pace
from gemm_tuner.cli.worker_processes import WorkerProcesses
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.estimate import Estimate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.quorum import MAX_QUORUM
from gemm_tuner.errors import InvalidSetting, SandboxMissing, ToolchainMissing
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.sandbox.confine import needed_sandbox
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import (
    database_file,
    default_database_url,
    is_read_only,
    open_database,
)
from gemm_tuner.trust.attestation import MeasuringKeys
from gemm_tuner.trust.keys import KEY_VARIABLE, KeyPair, default_key_path
from gemm_tuner.trust.local import default_socket_path
from gemm_tuner.trust.ownership import check_owned
from gemm_tuner.trust.succession import succession_path

_LOOPBACK = "127.0.0.1"
_PORT = 8000


def serve(
    *,
    socket_path: Annotated[
        Path | None,
        typer.Option(
            "--socket",
            envvar="GEMM_TUNER_SOCKET",
            metavar="FILE",
            help="Unix socket to listen on, for you alone; by default one in your data directory",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            envvar="GEMM_TUNER_HOST",
            help="Address to listen on; by default 127.0.0.1. Beyond loopback it needs TLS or a "
            "proxy",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            envvar="GEMM_TUNER_PORT",
            min=0,
            max=65535,
            help="Listen on a TCP port instead, 0 for a free one; with --host by default 8000",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            envvar=KEY_VARIABLE,
            metavar="FILE",
            help="Signing key, made if missing; by default in your data directory",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            envvar="GEMM_TUNER_TLS_CERTIFICATE",
            metavar="FILE",
            help="Chain of certificates in PEM, to speak https",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            "--tls-key",
            envvar="GEMM_TUNER_TLS_KEY",
            metavar="FILE",
            help="Its private key in PEM; by default in the file of the certificate",
        ),
    ] = None,
    behind_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--behind-proxy",
            envvar="GEMM_TUNER_BEHIND_PROXY",
            metavar="ADDRESS",
            help="Believe X-Forwarded-For and X-Forwarded-Proto of the proxy at this address or "
            "network, or unix for one at the socket; may be given several times",
        ),
    ] = None,
    client_rate: Annotated[
        int,
        typer.Option(
            "--client-rate",
            envvar="GEMM_TUNER_CLIENT_RATE",
            min=1,
            max=1_000_000,
            help="Problems a second that one client may ask for",
        ),
    ] = PER_SECOND,
    processes: Annotated[
        int,
        typer.Option(
            "--processes",
            envvar="GEMM_TUNER_PROCESSES",
            min=1,
            max=256,
            help="Processes that answer, each with limits and a memory of its own",
        ),
    ] = 1,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            envvar="GEMM_TUNER_WORKERS",
            min=0,
            max=16,
            help="Processes beside the service that tune what is asked for, 0 for none; one "
            "measures at a time",
        ),
    ] = 1,
    quorum: Annotated[
        int,
        typer.Option(
            "--quorum",
            envvar="GEMM_TUNER_QUORUM",
            min=1,
            max=MAX_QUORUM,
            help="Hosts, each with a measuring key of its own, that must find the same before a "
            "kernel is served",
        ),
    ] = 1,
    access_log: Annotated[
        bool,
        typer.Option(
            "--access-log",
            envvar="GEMM_TUNER_ACCESS_LOG",
            help="Write a line of JSON for each request to the output",
        ),
    ] = False,
    db: options.DatabaseUrl = None,
) -> None:
    """Serve verdicts and kernels until stopped by Ctrl-C."""
    settings = Settings(
        database_url=db or default_database_url(),
        signing_key_path=key or default_key_path(),
        default_cpu=detect_cpu(),
        proxies=Proxies.parse(behind_proxy or ()),
        client_rate=client_rate,
        quorum=quorum,
        estimate=_estimate,
    )
    tls = _tls_of(tls_certificate, tls_key)
    place = None if host is not None or port is not None else socket_path or default_socket_path()
    for made in filter(None, (settings.signing_key_path, place)):
        check_no_database(made, [settings.database_url])
    database = database_file(settings.database_url)
    if database is not None:
        check_owned(database, is_database=True)
    # Failures to open are reported here, in one line; inside the server they would be tracebacks.
    engine = open_database(settings.database_url, only_reads=True)
    repository = Repository(engine)
    revoked = repository.revocations().key_ids
    earlier = quorum if is_read_only(engine) else _require(repository, quorum)
    engine.dispose()
    measuring = MeasuringKeys()
    for file in (
        settings.signing_key_path,
        measuring.own_path,
        measuring.accepted_path,
        succession_path(settings.signing_key_path),
        *((tls.key,) if tls else ()),
    ):
        check_owned(file)
    key_id = KeyPair.load_or_create(settings.signing_key_path).key_id
    if key_id in revoked:
        raise InvalidSetting(
            f"the signing key {key_id} was revoked, so no client would believe an answer; "
            'make another: "gemm-tuner keys rotate --compromised".'
        )
    # The stopped server raises the signal again; the default handler would skip the clean-up.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _listen(socket_path, host, port) as listener, suppress(KeyboardInterrupt):
        has_proxy = bool(settings.proxies.networks)  # one at the socket is none at a port
        if is_reachable_from_elsewhere(listener) and tls is None and not has_proxy:
            raise InvalidSetting(
                f"other machines could read what is sent to {host}: tokens would be there in "
                "clear text; give --tls-certificate, or --behind-proxy for a proxy with TLS."
            )
        url = url_of(listener, has_tls=tls is not None)
        print_message(f"Serving at {url}; its interface is at /docs.")
        print_message(f"Answers are signed with the key {key_id}.")
        if quorum != earlier:
            print_message(f"The quorum was {earlier}, and is {quorum} now: verdicts are new.")
        count = _workers_here(workers, engine)
        with WorkerProcesses(count, settings.database_url, tell=print_message):
            run_service(settings, listener, tls=tls, processes=processes, has_access_log=access_log)


def _require(repository: Repository, quorum: int) -> int:
    """Let verdicts need so many hosts, and return how many they needed before."""
    with ProgressLine("quorum", later_s=0) as line:
        show = pace(line)
        return repository.require_quorum(quorum, lambda done, all_: show("verdicts", done, all_))


def _workers_here(wanted: int, engine: Engine) -> int:
    """Return how many workers can run beside this service, and say why there is none."""
    if is_read_only(engine):
        print_message(
            "Warning: the database cannot be written, only read, so no worker runs; make room on "
            "its disk, or its folder writable, before something is to be measured."
        )
        return 0
    try:
        if wanted:
            find_toolchain()
            needed_sandbox()
    except (ToolchainMissing, SandboxMissing) as error:
        print_message(f"Warning: no worker runs, so what is asked for waits for another: {error}")
        return 0
    return wanted


def _tls_of(certificate: Path | None, key: Path | None) -> TlsFiles | None:
    if certificate is None:
        if key is not None:
            raise InvalidSetting("--tls-key is nothing without --tls-certificate; give both.")
        return None
    files = TlsFiles(certificate, key or certificate)
    files.context()  # its faults are told here
    return files


def _listen(
    socket_path: Path | None, host: str | None, port: int | None
) -> AbstractContextManager[socket.socket]:
    is_tcp = host is not None or port is not None
    if is_tcp and socket_path is not None:
        raise InvalidSetting("--socket goes with neither --host nor --port; choose one of them.")
    if is_tcp:
        return listen_on_port(host or _LOOPBACK, _PORT if port is None else port)
    return listen_on_socket(socket_path or default_socket_path())


def _estimate(problem: Problem, context: ExecutionContext, cpu: Cpu, budget_s: float) -> Estimate:
    """Return the size of a sweep; few services are asked for it."""
    # NumPy and the space take long to load.
    from gemm_tuner.tuning.estimate import estimate_job  # noqa: PLC0415

    return estimate_job(problem, context, cpu, budget_s)
