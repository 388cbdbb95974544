"""What a library makes of many problems, in forks of one process that has loaded it."""

import socket
import subprocess
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from planted import build_planted

from gemm_tuner.bench import isolate
from gemm_tuner.bench.drivers import build_drivers
from gemm_tuner.bench.messages import receive
from gemm_tuner.bench.requests import OPENINGS, Baselines, Opening, ScalarRequest, Setup
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.context import Regime
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.sandbox.confine import needed_sandbox

_SERVER = Path(__file__).with_name("library_server.py")
_STALL_TIMEOUT_S = 5.0
# What takes long to load, and starts no threads, which would not survive a fork.
_MODULES = {
    "torch": ["torch"],
    "torch-weights": ["torch"],
    "zentorch": ["torch"],
}


class Libraries:
    """Processes for libraries and numbers of threads, started when a problem is for them.

    A library is found, checked and guarded as in a `TrialHost`, but outside of its sandbox, and
    loaded once. Use it in a `with` statement.
    """

    def __init__(self, folder: Path, *, hidden_wheel: str = "") -> None:
        """Write what libraries write to `folder`, and find one wheel nowhere."""
        self._folder = str(folder)
        self._hidden_wheel = hidden_wheel
        self._servers: dict[tuple[str, int], socket.socket] = {}
        self._stack = ExitStack()

    def baseline_of(self, problem: str, *, baseline: str, threads: int = 1) -> str:
        """Return the name of a baseline that was found to be right on a problem."""
        return self._baselines(problem, baseline, threads).text

    def implementation_of(self, problem: str, baseline: str) -> str:
        """Return by what a baseline computes that was found to be right on a problem."""
        (implementation,) = self._baselines(problem, baseline, threads=1).implementations.values()
        return implementation

    def _baselines(self, problem: str, baseline: str, threads: int) -> Baselines:
        """Return the baselines of a session on a problem.

        Raises:
            BaselineMissing: the library does not compute the problem.
        """
        toolchain = find_toolchain()
        setup = Setup(
            problem_text=problem,
            threads=threads,
            baselines=(baseline,),
            drivers=build_drivers(toolchain, detect_cpu(), baselines=(baseline,)),
            seed=1,
            stall_timeout_s=_STALL_TIMEOUT_S,
            sandbox=needed_sandbox(),
        )
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as connection:
            with theirs:
                socket.send_fds(self._server(baseline, threads), [b"\0"], [theirs.fileno()])
            connection.send(setup)
            answer = receive(connection, OPENINGS)
            if isinstance(answer, ScalarRequest):
                connection.send(build_planted(toolchain))
                answer = receive(connection, OPENINGS)
        if isinstance(answer, GemmTunerError):
            raise answer
        assert isinstance(answer, Opening)
        return answer.baselines[Regime.HOT]

    def _server(self, baseline: str, threads: int) -> socket.socket:
        if (baseline, threads) not in self._servers:
            ours, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        _SERVER,
                        str(theirs.fileno()),
                        self._hidden_wheel,
                        *_MODULES.get(baseline, []),
                    ],
                    pass_fds=[theirs.fileno()],
                    env=isolate._environment(threads, self._folder),
                )
            self._stack.enter_context(process)
            self._stack.enter_context(ours)  # closed first, which ends the process
            self._servers[baseline, threads] = ours
        return self._servers[baseline, threads]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
