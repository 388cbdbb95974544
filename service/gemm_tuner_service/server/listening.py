"""Where the service listens: a Unix socket of its user, or a TCP port."""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

from gemm_tuner.errors import MissingCapability

_FREE_FOR_OWNER = 0o177  # a umask: others can neither read nor write


@contextmanager
def listen_on_port(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that listens: from here on callers wait for the start, and are not refused.

    Raises:
        MissingCapability: the address is not there, or is in use.
    """
    try:
        family, _kind, _protocol, _name, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.create_server((str(address[0]), int(address[1])), family=family)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MissingCapability(
            f"nothing can listen at {host}, port {port} ({reason}); "
            "stop what does, or choose another --host or --port."
        ) from None
    with listener:
        # Connections inherit it. asyncio sets it only on sockets that name their protocol, which
        # create_server's do not; without it each answer but the first waits 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


@contextmanager
def listen_on_socket(path: Path) -> Iterator[socket.socket]:
    """Yield a Unix socket that listens for this user alone, and remove it in the end.

    Raises:
        MissingCapability: a service listens there already, or the socket cannot be made.
    """
    with os.fdopen(_lock_of(path)):
        # Whoever holds the lock owns the name: what is there was left by a service that died.
        _remove_socket(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _bind_privately(listener, path)
            try:
                yield listener
            finally:
                _remove_socket(path)


def url_of(listener: socket.socket, *, has_tls: bool = False) -> str:
    """Return the address at which clients find a listening socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_reachable_from_elsewhere(listener: socket.socket) -> bool:
    """Return whether other machines can connect."""
    if listener.family == socket.AF_UNIX:
        return False
    return not ip_address(listener.getsockname()[0]).is_loopback


def _lock_of(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):  # no lock is left
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        lock = os.open(path.with_name(f"{path.name}.lock"), flags, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MissingCapability(
            f"a service listens at {path} already; stop it, or choose another --socket or a --port."
        ) from None
    except OSError as error:
        raise _cannot_listen(path, error) from None
    return lock


def _bind_privately(listener: socket.socket, path: Path) -> None:
    before = os.umask(_FREE_FOR_OWNER)
    try:
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        raise _cannot_listen(path, error) from None
    finally:
        os.umask(before)


def _cannot_listen(path: Path, error: OSError) -> MissingCapability:
    return MissingCapability(
        f"nothing can listen at {path} ({error.strerror or error}); "
        "choose another --socket, or a --port."
    )


def _remove_socket(path: Path) -> None:
    """Remove a socket, and nothing else."""
    with suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
