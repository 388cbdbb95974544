"""Where service and clients of one user meet on one machine."""

import socket
import struct
from pathlib import Path

from platformdirs import user_data_path

_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid: struct ucred


def default_socket_path() -> Path:
    """Return the Unix socket of the user's service, in the user's data directory."""
    return user_data_path("gemm-tuner") / "service.sock"


def peer_uid(connection: socket.socket) -> int:
    """Return the user whose process is at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(credentials)[1]
    return uid
