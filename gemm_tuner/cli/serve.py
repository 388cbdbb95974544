"""`gemm-tuner serve`: run the service on this machine. The only module that knows it."""

import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from gemm_tuner_service.app import create_app
from gemm_tuner_service.settings import Settings

from gemm_tuner.cli import options
from gemm_tuner.cli.output import print_message
from gemm_tuner.errors import MissingCapability
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.database import default_database_url, open_database
from gemm_tuner.trust.keys import KeyPair, default_key_path


def serve(
    host: Annotated[str, typer.Option("--host", help="Address to listen on")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 for a free one")
    ] = 8000,
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
    """Serve verdicts and kernels over HTTP until stopped by Ctrl-C."""
    settings = Settings(
        database_url=db or default_database_url(),
        signing_key_path=key or default_key_path(),
        default_cpu=detect_cpu(),
    )
    # What cannot be opened is told here, in one line: inside the server it would be a traceback.
    open_database(settings.database_url).dispose()
    KeyPair.load_or_create(settings.signing_key_path)
    with _listen(host, port) as listener, suppress(KeyboardInterrupt):
        print_message(f"Serving at {_url_of(listener)}; its interface is at /docs.")
        config = uvicorn.Config(create_app(settings), log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens: from here on callers wait for the start, and are not refused.

    Raises:
        MissingCapability: the address is not there, or is in use.
    """
    try:
        family, _kind, _protocol, _name, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MissingCapability(
            f"nothing can listen at {host}, port {port} ({reason}); "
            "stop what does, or choose another --host or --port."
        ) from None


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
