"""Someone between client and service: relays connections, and answers in the service's place."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from math import inf

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(kw_only=True)
class Relay:
    """Passes connections on to a port, but closes the first `drops` without an answer.

    Of each answer only the first `most_bytes` arrive, as if the network were cut.
    """

    target_port: int
    drops: int = 0
    most_bytes: float = inf
    connections: int = 0
    address: str = ""
    _open: list[socket.socket] = field(default_factory=list)

    @contextmanager
    def relaying(self) -> Iterator[str]:
        """Listen on a free port, and yield the address."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            thread = threading.Thread(target=self._accept, args=(listener,))
            thread.start()
            try:
                yield self.address
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                self.cut()
                thread.join()

    def cut(self) -> None:
        """Close all connections."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        threads = []
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:
                break
            self.connections += 1
            if self.connections <= self.drops:
                caller.close()
                continue
            service = socket.create_connection(("127.0.0.1", self.target_port))
            self._open += [caller, service]
            for one, other, most_bytes in (
                (caller, service, inf),
                (service, caller, self.most_bytes),
            ):
                arguments = (one, other, most_bytes)
                threads.append(threading.Thread(target=_pass_on, args=arguments))
                threads[-1].start()
        for thread in threads:
            thread.join()
        for each in self._open:
            each.close()


def _pass_on(one: socket.socket, other: socket.socket, most_bytes: float) -> None:
    passed_bytes = 0
    with suppress(OSError):
        while received := one.recv(2**12):
            if passed_bytes < most_bytes:
                other.sendall(received)
            passed_bytes += len(received)
    with suppress(OSError):
        other.shutdown(socket.SHUT_RDWR)


class Instead:
    """Answers the first requests for `path` in the place of the service, one for each status."""

    def __init__(
        self,
        path: str,
        *statuses: int,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        body: bytes = b"not now",
    ) -> None:
        self._path = path
        self._left = list(statuses)
        self._headers = headers
        self._body = body
        self.asked = self.answered = 0  # the latter by the service, with what was asked for

    def __call__(self, app: ASGIApp) -> ASGIApp:
        """Return `app` behind this."""

        async def middle(scope: Scope, receive: Receive, send: Send) -> None:
            is_meant = scope["type"] == "http" and scope["path"] == self._path
            self.asked += is_meant
            if not is_meant or not self._left:

                async def count(message: Message) -> None:
                    is_whole = message.get("status") == HTTPStatus.OK
                    self.answered += is_meant and is_whole
                    await send(message)

                await app(scope, receive, count)
                return
            start = {"status": self._left.pop(0), "headers": list(self._headers)}
            await send({"type": "http.response.start", **start})
            await send({"type": "http.response.body", "body": self._body})

        return middle
