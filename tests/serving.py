"""A real server around the service, for as long as a test needs it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from gemm_tuner_service.app import create_app
from gemm_tuner_service.connections import ConnectionLimits, server_config
from gemm_tuner_service.listening import listen_on_port
from gemm_tuner_service.settings import Settings


class _Server(uvicorn.Server):
    """A server that tells when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@contextmanager
def served(settings: Settings, limits: ConnectionLimits | None = None) -> Iterator[httpx.Client]:
    """Run the service on a free port of the loopback interface, and yield a client of it."""
    with listen_on_port("127.0.0.1", 0) as listener:
        server = _Server(server_config(create_app(settings), limits, log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        assert server.up.wait(timeout=30)
        try:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=address, timeout=60) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()
