"""A real server around the service, for as long as a test needs it."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from gemm_tuner_service.app import create_app
from gemm_tuner_service.server.connections import ConnectionLimits, server_config
from gemm_tuner_service.server.listening import listen_on_port, listen_on_socket, url_of
from gemm_tuner_service.server.tls import TlsFiles
from gemm_tuner_service.settings import Settings
from samples import CPU, add_build, make_trial

from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

# To read all authorities of the world, as httpx does for each client, takes 40 ms.
NO_AUTHORITY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _Server(uvicorn.Server):
    """A server that tells when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@contextmanager
def served(
    settings: Settings,
    limits: ConnectionLimits | None = None,
    *,
    tls: TlsFiles | None = None,
    trusted: ssl.SSLContext | None = None,
    path: Path | None = None,
) -> Iterator[httpx.Client]:
    """Run the service, and yield a client of it.

    It listens on a free port of the loopback interface, or on the Unix socket `path`. With `tls` it
    speaks https, and the client believes the certificates in `trusted`.
    """
    with listen_on_port("127.0.0.1", 0) if path is None else listen_on_socket(path) as listener:
        server = _Server(server_config(create_app(settings), limits, tls=tls, log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        assert server.up.wait(timeout=30)
        try:
            transport = None if path is None else httpx.HTTPTransport(uds=str(path))
            address = url_of(listener, has_tls=tls is not None) if path is None else "http://x"
            with httpx.Client(
                base_url=address, timeout=60, transport=transport, verify=trusted or NO_AUTHORITY
            ) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


def tune(url: str) -> None:
    """Let a store hold one tuned problem."""
    engine = open_database(url)
    repository = Repository(engine)
    add_build(repository)
    repository.add_trial(make_trial())
    engine.dispose()


def settings_of(url: str, folder: Path) -> Settings:
    """Return the settings of a service with a store and a folder of its own."""
    return Settings(
        database_url=url, signing_key_path=folder / "keys" / "signing.pem", default_cpu=CPU
    )
