"""The service in one process, or in several that share an address."""

import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from gemm_tuner.errors import MissingCapability
from gemm_tuner.scratch import scratch_folder
from gemm_tuner_service.app import create_app
from gemm_tuner_service.logs import AccessLogHandler, bound_logs, log_access
from gemm_tuner_service.metrics import FOLDER_VARIABLE
from gemm_tuner_service.server.connections import server_config
from gemm_tuner_service.server.tls import TlsFiles
from gemm_tuner_service.settings import Settings

_START_S = 30  # how long a process may take to start, and then to say that it lives
_OBJECTS_BETWEEN_COLLECTIONS = 20_000
_PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOfService:
    """What makes the application in the process that answers, and lets that process write logs."""

    settings: Settings
    has_access_log: bool

    def __call__(self) -> ASGIApp:
        """Return the application."""
        _end_with_parent()
        bound_logs()
        if self.has_access_log:
            log_access(AccessLogHandler(sys.stdout))
        application = create_app(self.settings)
        _collect_seldom()
        return application


def _collect_seldom() -> None:
    """Let garbage be collected after more objects, and never what the process began with.

    An answer makes some hundred objects and leaves no cycles, but fills memories of answers: to
    look through all of these again and again took an eighth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)


def run_service(
    settings: Settings,
    listener: socket.socket,
    *,
    tls: TlsFiles | None = None,
    processes: int = 1,
    has_access_log: bool = False,
) -> None:
    """Answer at `listener` until SIGINT or SIGTERM; one of several processes that dies is replaced.

    Each process has a memory, limits of clients and a bound on connections of its own.

    Raises:
        MissingCapability: a process cannot start, or several have no folder for their numbers.
    """
    config = server_config(
        ProcessOfService(settings=settings, has_access_log=has_access_log),
        tls=tls,
        factory=True,
        workers=processes,
        timeout_worker_healthcheck=_START_S,
        log_config=None,
        log_level="warning",
    )
    if processes == 1:
        uvicorn.Server(config).run(sockets=[listener])
        return
    bound_logs()
    with folder_of_numbers():
        supervisor = Multiprocess(config, [listener])
        supervisor.run()
    if any(process.exitcode == STARTUP_FAILURE for process in supervisor.processes):
        raise MissingCapability(
            "one of the processes could not start; the messages above say why, "
            "and --processes 1 shows it in one."
        )


@contextmanager
def folder_of_numbers() -> Iterator[None]:
    """Let processes add up their numbers in a folder, while they run."""
    if os.environ.get(FOLDER_VARIABLE):
        yield
        return
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder("gemm-tuner-metrics-"))
        except OSError as error:
            raise MissingCapability(
                f"there is no folder for the numbers of several processes ({error.strerror}); "
                f"name a writable one in TMPDIR or {FOLDER_VARIABLE}."
            ) from None
        os.environ[FOLDER_VARIABLE] = str(folder)
        try:
            yield
        finally:
            del os.environ[FOLDER_VARIABLE]


def _end_with_parent() -> None:
    """Let the system stop a process whose parent was killed, so that none is left over."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent.pid:
        sys.exit(STARTUP_FAILURE)
