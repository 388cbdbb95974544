"""Run trials in processes that may die: a crash or a hang there is an outcome here."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Self

from gemm_tuner.bench.baselines.choose import AUTO, Race
from gemm_tuner.bench.drivers import build_drivers
from gemm_tuner.bench.emulator import plan_emulation
from gemm_tuner.bench.finding import TIMED_FINDINGS, Finding, TimedFinding
from gemm_tuner.bench.messages import receive
from gemm_tuner.bench.requests import (
    OPENINGS,
    Baselines,
    Opening,
    ScalarRequest,
    Setup,
    TimeRequest,
    VerifyRequest,
)
from gemm_tuner.build.compile import Build
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.sandbox import SandboxLevel
from gemm_tuner.errors import (
    GemmTunerError,
    InvalidSetting,
    PreparationStopped,
    TrialFailed,
)
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.urgency import start_session
from gemm_tuner.runtime.pool import pins_threads
from gemm_tuner.sandbox.confine import confined, needed_sandbox
from gemm_tuner.scratch import scratch_folder

_STALL_TIMEOUT_S = 5.0
_LOOK_S = 0.1
# What the server is told of the environment. The rest may hold passwords, and settings of libraries
# would keep these from choosing the best for this machine.
_TOLD = (
    *("PATH", "LANG", "TZ", "USER", "LOGNAME", "MKLROOT", "CXX", "VIRTUAL_ENV", "GLIBC_TUNABLES"),
    *("GEMM_TUNER_ISA", "GEMM_TUNER_PIN"),
)
_TOLD_FAMILIES = ("LC_", "LD_", "PYTHON", "MALLOC_")
_LIMITS = {"CORE": 0, "FSIZE": 1 << 30, "NPROC": 4096}
_FOLDERS_OF_LIBRARIES = "LD_LIBRARY_PATH"


class TrialHost:
    """A server process in which candidates of one problem are verified and timed.

    It prepares inputs, exact results and the baselines once. Each request runs in a child that the
    server forks, so that a candidate can end nothing but its own trial. As many threads as there
    are `provers` may ask at the same time: the server forks itself for them. Use it in a `with`
    statement. It times in the regimes of its races, beside the `baselines` of each.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        threads: int,
        baseline: str | Sequence[str] = AUTO,
        toolchain: Toolchain,
        seed: int,
        scalar_build: Callable[[], Build],
        one_thread_build: Build | None = None,
        stall_timeout_s: float = _STALL_TIMEOUT_S,
        provers: int = 1,
        races: Sequence[Race] = (Race(),),
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the server and wait until it is ready.

        Args:
            problem: what candidates compute.
            threads: how many threads call them and the baselines.
            baseline: a name in the table of baselines, `auto` for the best one that is there, or
                several names, of which those that can be used are timed in the same rounds.
            toolchain: compiles the drivers.
            seed: of the random inputs.
            scalar_build: makes the baseline if there is no library.
            one_thread_build: the baseline `one-thread`.
            stall_timeout_s: how long a candidate may run without progress, besides a multiple of
                the time that the baseline takes and what it waited for a core.
            provers: how many builds can be verified at the same time, fewer where memory is short.
            races: how the baseline `auto` is decided in each regime that is timed.
            is_stopped: whether nobody waits any more; asked until the server is ready, which takes
                long where a call does.

        Raises:
            BaselineMissing: no baseline is installed and computes the problem.
            InvalidSetting: a variable of the environment that kernels read is wrong.
            NotEnoughMemory: the operands do not fit into this machine.
            PreparationStopped: it `is_stopped`.
            TrialFailed: the server could not be started.
        """
        pins_threads()  # which each candidate would fail for
        self._threads = threads
        self._toolchain = toolchain
        sandbox = needed_sandbox()
        names = (baseline,) if isinstance(baseline, str) else tuple(baseline)
        setup = Setup(
            problem_text=problem.text,
            threads=threads,
            baselines=names,
            drivers=build_drivers(toolchain, detect_cpu(), baselines=names, is_stopped=is_stopped),
            seed=seed,
            one_thread_build=one_thread_build,
            stall_timeout_s=stall_timeout_s,
            provers=provers,
            races=tuple(races),
            sandbox=sandbox,
        )
        self._folder = ExitStack()
        self._connections: list[Connection] = []
        try:
            self._process = self._start(setup)
        except BaseException as error:
            self._let_go()
            if isinstance(error, OSError):
                raise TrialFailed(
                    f"the trial server could not be started ({error}); make room for it, and try "
                    "again."
                ) from error
            raise
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        self._idle.put(self._connections[0])
        try:
            opening = self._open(setup, scalar_build, is_stopped)
        except BaseException:
            self.close()
            raise
        for connection in self._connections[1 : opening.provers]:
            self._idle.put(connection)
        self._baselines = opening.baselines
        self.provers = opening.provers

    def baselines(self, regime: Regime = Regime.HOT) -> Baselines:
        """Return the baselines beside which builds are timed in a regime.

        Raises:
            InvalidSetting: this host was not started for the regime.
        """
        if regime not in self._baselines:
            raise InvalidSetting(
                f"regime = {regime.value!r}, but this host was started for "
                f"{' and '.join(map(repr, map(str, self._baselines)))}; start another one."
            )
        return self._baselines[regime]

    def verify(self, build: Build) -> Finding:
        """Return whether a build computes what it should and touches nothing else.

        Features that this CPU lacks are emulated if they can be; the finding says so.

        Raises:
            CompilationFailed: the compiler refused the emulator.
            TrialFailed: the server broke.
        """
        emulation = plan_emulation(
            build.artifact.required_isa, cpu=detect_cpu(), toolchain=self._toolchain
        )
        finding: Finding = self._ask(VerifyRequest(build=build, emulation=emulation), Finding)
        return finding

    def time(
        self,
        build: Build,
        *,
        context: ExecutionContext,
        pairs: int,
        sample_ns: int,
        reads: bool = False,
        checks_large_ratios: bool = False,
    ) -> TimedFinding:
        """Return the measurements of a verified build, timed in alternation with the baselines.

        The arguments and errors are those of `time_together`.
        """
        (found,) = self.time_together(
            [build],
            context=context,
            pairs=pairs,
            sample_ns=sample_ns,
            reads=reads,
            checks_large_ratios=checks_large_ratios,
        )
        return found

    def time_together(
        self,
        builds: Sequence[Build],
        *,
        context: ExecutionContext,
        pairs: int,
        sample_ns: int,
        reads: bool = False,
        checks_large_ratios: bool = False,
        process: int = 0,
        keeps_all: bool = False,
    ) -> tuple[TimedFinding, ...]:
        """Return the measurements of verified builds, timed in alternation with the baselines.

        All are timed in the same rounds; those clearly slower than the fastest take part in the
        first few only.

        Args:
            builds: what to time.
            context: its regime; the threads must be those of this host.
            pairs: how many samples are taken of each.
            sample_ns: how long a sample takes at least, in ns; a longer call is one sample.
            reads: whether a loop takes part that only reads what a call must touch.
            checks_large_ratios: whether baselines that are much slower than a build are timed
                without the epilogue, too, so that one can tell whether that is plausible.
            process: the number of the process among those that time the same: in each, arrays
                begin elsewhere.
            keeps_all: whether every sample of each is wanted, of those that are clearly slower and
                of interrupted rounds too.

        Raises:
            InvalidSetting: the context has other threads than this host, or a regime that it was
                not started for.
            NotEnoughMemory: the copies of the weights of no build fit into this machine.
            TrialFailed: the server broke, or every baseline.
        """
        if context.threads != self._threads:
            raise InvalidSetting(
                f"threads = {context.threads}, but this host was started for {self._threads}; "
                "start another one."
            )
        self.baselines(context.regime)
        request = TimeRequest(
            builds=tuple(builds),
            regime=context.regime,
            pairs=pairs,
            sample_ns=sample_ns,
            reads=reads,
            checks_large_ratios=checks_large_ratios,
            process=process,
            keeps_all=keeps_all,
        )
        found: tuple[TimedFinding, ...] = self._ask(request, TIMED_FINDINGS)
        return found

    def close(self) -> None:
        """End the server, what it forked, and the children that may be running."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._let_go()

    def _let_go(self) -> None:
        for connection in self._connections:
            connection.close()
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _start(self, setup: Setup) -> "subprocess.Popen[bytes]":
        folder = self._folder.enter_context(scratch_folder("gemm-tuner-trials-"))
        # In namespaces, /tmp is a folder of the server's own anyway.
        is_alone = setup.sandbox.level is SandboxLevel.NAMESPACES
        own = "/tmp" if is_alone else str(folder)  # noqa: S108
        descriptors: list[int] = []
        with ExitStack() as stack:
            for _prover in range(setup.provers):
                ours, theirs = socket.socketpair()
                self._connections.append(Connection(ours.detach()))
                descriptors.append(stack.enter_context(theirs).fileno())
            server = [sys.executable, "-P", "-m", "gemm_tuner.bench.trial_server"]
            return start_session(
                confined(
                    [*server, *map(str, descriptors)],
                    limits=_LIMITS,
                    visible=[
                        setup.drivers.crash.parent,
                        *os.environ.get(_FOLDERS_OF_LIBRARIES, "").split(os.pathsep),
                    ],
                    writable=[] if is_alone else [own],
                ),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(setup.threads, own),
            )

    def _open(
        self, setup: Setup, scalar_build: Callable[[], Build], is_stopped: Callable[[], bool]
    ) -> Opening:
        """Wait until the server is ready; build the scalar loop if it asks for that."""
        answer: Opening | ScalarRequest = self._ask(setup, OPENINGS, is_stopped)
        if isinstance(answer, ScalarRequest):
            answer = self._ask(scalar_build(), OPENINGS, is_stopped)
        assert isinstance(answer, Opening)
        return answer

    def _ask(
        self,
        request: object,
        wanted: Any,  # noqa: ANN401 - a type
        is_stopped: Callable[[], bool] | None = None,
    ) -> Any:  # noqa: ANN401 - of the type that is wanted
        connection = self._idle.get()
        try:
            connection.send(request)
            while is_stopped is not None and not connection.poll(_LOOK_S):
                if is_stopped():
                    raise PreparationStopped("what trials need is prepared no more.")
            answer = receive(connection, wanted)
        except (EOFError, OSError, TypeError) as error:  # TypeError: closed by another thread
            raise TrialFailed(
                f"the trial server ended with status {self._process.poll()}; start it again."
            ) from error
        finally:
            self._idle.put(connection)
        if isinstance(answer, GemmTunerError):
            raise answer
        return answer


def _environment(threads: int, folder: str) -> dict[str, str]:
    told = {
        name: value
        for name, value in os.environ.items()
        if name in _TOLD or name.startswith(_TOLD_FAMILIES)
    }
    return {
        **told,
        "HOME": folder,
        "TMPDIR": folder,
        "OMP_NUM_THREADS": str(threads),
        # NumPy in the server must start no threads: they would not survive a fork.
        "OPENBLAS_NUM_THREADS": "1",
        # A library's idle threads must soon stop spinning, or they would slow down the runner that
        # is timed next; between two calls of a loop they still spin.
        "GOMP_SPINCOUNT": "20000",
        "OPENBLAS_THREAD_TIMEOUT": "16",
        # MKL shares its threads with the others that use OpenMP.
        "MKL_INTERFACE_LAYER": "LP64",
        "MKL_THREADING_LAYER": "SEQUENTIAL" if threads == 1 else "GNU",
        "MKL_DYNAMIC": "FALSE",
        # The threads of SYCL on a CPU.
        "DPCPP_CPU_NUM_CUS": str(threads),
    }
