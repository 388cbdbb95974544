"""Connections to a TCP port or to a Unix socket of this user, each operation with a deadline.

An operation may take the rest of the time of the whole ask, so that a service that sends a
byte now and then cannot hold its caller.
"""

import os
import select
import socket
import time
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from ssl import SSLContext
from threading import Thread
from typing import Any

import httpcore

from gemm_tuner.trust.local import peer_uid

ROOT_UID = 0

_RETRY_S = 0.01


class OtherUserListens(httpcore.ConnectError):
    """At the other end of a Unix socket is a process of another user."""


class Deadline:
    """The moment at which an ask ends, `timeout_s` from now."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds that are left, more than 0.

        Raises:
            httpcore.ReadTimeout: there are none.
        """
        left_s = self.rest_s()
        if left_s <= 0:
            raise httpcore.ReadTimeout(f"no whole answer within {self.timeout_s:g} s")
        return left_s

    def rest_s(self) -> float:
        """Return the seconds that are left, 0 if there are none."""
        return max(0.0, self._end_s - time.monotonic())


class BoundedBackend(httpcore.NetworkBackend):
    """Opens connections whose every operation ends at what `deadline` then returns.

    A connection is kept for other asks, with other deadlines.
    """

    def __init__(self, deadline: Callable[[], Deadline]) -> None:
        self._deadline = deadline
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002 - the deadline stands for all
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Return a connection to the first address of `host` that answers."""
        addresses = _addresses_of(host, port, self._deadline())
        for count, address in enumerate(addresses):
            share_s = self._deadline().left_s() / (len(addresses) - count)
            try:
                stream = self._backend.connect_tcp(
                    address, port, share_s, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if count + 1 == len(addresses):
                    raise
            else:
                return _BoundedStream(stream, self._deadline)
        raise httpcore.ConnectError(f"the name {host!r} has no address")

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002 - the deadline stands for all
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002 - those of TCP
    ) -> httpcore.NetworkStream:
        """Return a connection to a socket behind which this user listens, or root."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connect(connection, path)
            _check_peer(connection)
        except OSError as error:
            connection.close()
            raise httpcore.ConnectError(str(error)) from error
        except BaseException:
            connection.close()
            raise
        return _UnixStream(connection, self._deadline)

    def _connect(self, connection: socket.socket, path: str) -> None:
        while True:
            connection.settimeout(self._deadline().left_s())
            try:
                connection.connect(path)
            except BlockingIOError:  # too many wait to be accepted
                time.sleep(_RETRY_S)
            else:
                return


def _check_peer(connection: socket.socket) -> None:
    uid = peer_uid(connection)
    if uid not in {os.getuid(), ROOT_UID}:
        raise OtherUserListens(
            f"the user {uid} listens there, not you, {os.getuid()}: nothing was asked"
        )


class _BoundedStream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, deadline: Callable[[], Deadline]) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        return self._stream.read(max_bytes, self._deadline().left_s())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        self._stream.write(buffer, self._deadline().left_s())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, self._deadline().left_s())
        return _BoundedStream(stream, self._deadline)

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 - as in the parent
        return self._stream.get_extra_info(info)


class _UnixStream(httpcore.NetworkStream):
    def __init__(self, connection: socket.socket, deadline: Callable[[], Deadline]) -> None:
        self._connection = connection
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        left_s = self._deadline().left_s()
        try:
            self._connection.settimeout(left_s)
            return self._connection.recv(max_bytes)
        except TimeoutError as error:
            raise httpcore.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        left_s = self._deadline().left_s()
        try:
            self._connection.settimeout(left_s)
            self._connection.sendall(buffer)  # its timeout is for all of it
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        self._connection.close()

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 - as in the parent
        if info == "is_readable":
            poll = select.poll()
            poll.register(self._connection, select.POLLIN)
            return bool(poll.poll(0))
        return None


def _addresses_of(host: str, port: int, deadline: Deadline) -> list[str]:
    """Return the addresses of a name; the system's resolver has no deadline, so a thread asks."""
    try:
        return [str(ip_address(host))]
    except ValueError:
        pass
    found: list[str] = []
    failed: list[OSError] = []

    def look_up() -> None:
        try:
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            failed.append(error)
        else:
            found.extend(str(row[4][0]) for row in rows)

    thread = Thread(target=look_up, name="gemm-tuner-resolver", daemon=True)
    thread.start()
    thread.join(deadline.left_s())
    if failed:
        raise httpcore.ConnectError(str(failed[0]))
    if thread.is_alive():
        raise httpcore.ConnectTimeout(f"the name {host!r} was not found in time")
    return list(dict.fromkeys(found))
