"""The processes of a `Libraries`: `python library_server.py DESCRIPTOR HIDDEN MODULE...`.

Each loads what takes seconds, and forks itself for the setup of each problem that it is sent. The
wheel HIDDEN, if it is not empty, is not found.
"""

import os
import socket
import sys
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from unittest import mock

from gemm_tuner.bench import trial_server
from gemm_tuner.libraries import wheels


def main(descriptor: int, hidden: str, modules: list[str]) -> None:
    for name in ("files", "version"):
        mock.patch.object(wheels, name, _hiding(hidden, getattr(metadata, name))).start()
    for name in modules:
        import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    with socket.socket(fileno=descriptor) as server:
        while True:
            _message, owners, _flags, _address = socket.recv_fds(server, 1, 1)
            if not owners:
                return
            child = os.fork()
            if child == 0:
                server.close()
                trial_server.main(owners)
                os._exit(0)
            os.close(owners[0])
            os.waitpid(child, 0)


def _hiding(hidden: str, found: Callable[[str], Any]) -> Callable[[str], Any]:
    def find(wheel: str) -> Any:  # noqa: ANN401 - what is asked for
        if wheel == hidden:
            raise metadata.PackageNotFoundError(wheel)
        return found(wheel)

    return find


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
