"""The processes of a `Libraries`: `python library_server.py DESCRIPTOR MODULE...`.

Each loads what takes seconds, and forks itself for the setup of each problem that it is sent.
"""

import os
import socket
import sys
from importlib import import_module
from pathlib import Path

from gemm_tuner.bench import trial_server


def main(descriptor: int, modules: list[str]) -> None:
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


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
