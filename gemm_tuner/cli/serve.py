"""`gemm-tuner serve`: run the service on this machine. The only module that knows it."""

import signal
import socket
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from gemm_tuner_service.app import create_app
from gemm_tuner_service.connections import server_config
from gemm_tuner_service.listening import (
    is_reachable_from_elsewhere,
    listen_on_port,
    listen_on_socket,
    url_of,
)
from gemm_tuner_service.logs import bound_logs
from gemm_tuner_service.settings import Settings

from gemm_tuner.cli import options
from gemm_tuner.cli.output import print_message
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.database import database_file, default_database_url, open_database
from gemm_tuner.trust.keys import KeyPair, default_key_path
from gemm_tuner.trust.local import default_socket_path
from gemm_tuner.trust.ownership import check_owned

_LOOPBACK = "127.0.0.1"
_PORT = 8000


def serve(
    socket_path: Annotated[
        Path | None,
        typer.Option(
            "--socket",
            metavar="FILE",
            help="Unix socket to listen on, for you alone; by default one in your data directory",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on; by default 127.0.0.1")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help="Listen on a TCP port instead, 0 for a free one; with --host by default 8000",
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="Signing key, made if missing; by default in your data directory",
        ),
    ] = None,
    db: options.DatabaseUrl = None,
) -> None:
    """Serve verdicts and kernels until stopped by Ctrl-C."""
    settings = Settings(
        database_url=db or default_database_url(),
        signing_key_path=key or default_key_path(),
        default_cpu=detect_cpu(),
    )
    # Failures to open are reported here, in one line; inside the server they would be tracebacks.
    open_database(settings.database_url).dispose()
    for file in (database_file(settings.database_url), settings.signing_key_path):
        if file is not None:
            check_owned(file)
    key_id = KeyPair.load_or_create(settings.signing_key_path).key_id
    # The stopped server raises the signal again; the default handler would skip the clean-up.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _listen(socket_path, host, port) as listener, suppress(KeyboardInterrupt):
        print_message(f"Serving at {url_of(listener)}; its interface is at /docs.")
        print_message(f"Answers are signed with the key {key_id}.")
        if is_reachable_from_elsewhere(listener):
            print_message(
                "Warning: other machines can connect, in clear text, and everyone who can reach "
                "the service can read everything in it; put it behind a proxy with TLS."
            )
        bound_logs()
        config = server_config(create_app(settings), log_config=None, log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])


def _listen(
    socket_path: Path | None, host: str | None, port: int | None
) -> AbstractContextManager[socket.socket]:
    is_tcp = host is not None or port is not None
    if is_tcp and socket_path is not None:
        raise InvalidSetting("--socket goes with neither --host nor --port; choose one of them.")
    if is_tcp:
        return listen_on_port(host or _LOOPBACK, _PORT if port is None else port)
    return listen_on_socket(socket_path or default_socket_path())
