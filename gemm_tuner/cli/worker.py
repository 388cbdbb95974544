"""`gemm-tuner worker`: run the jobs of a database on this machine."""

import ctypes
import os
import signal
from contextlib import suppress
from typing import Annotated

import typer

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli import options
from gemm_tuner.cli.interrupt import StopOnInterrupt
from gemm_tuner.cli.output import print_message
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.sandbox.confine import needed_sandbox
from gemm_tuner.store.database import open_database
from gemm_tuner.store.jobs import Jobs
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.worker import Worker

# Compiling and proving take a core: what answers on this machine, or works, goes first. A core that
# is idle is timed the same.
_NICENESS = 10
_PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h
_NOTICE = b"Stopping after what is in flight; a job goes back, for another worker.\n"


def worker(
    db: options.DatabaseUrl = None,
    compiler: options.Compiler = None,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
) -> None:
    """Tune what is asked of a service, one job after the other, until stopped by Ctrl-C."""
    if parent is not None and not _ends_with(parent):
        return
    toolchain = find_toolchain(compiler)
    sandbox = needed_sandbox()
    cpu = detect_cpu()
    engine = open_database(db)
    os.nice(_NICENESS)
    notice = _NOTICE if parent is None else b""  # the parent says that it ends
    with StopOnInterrupt(signal.SIGINT, signal.SIGTERM, notice=notice) as interrupt:
        here = Worker(
            jobs=Jobs(engine),
            repository=Repository(engine),
            cpu=cpu,
            toolchain=toolchain,
            tell=_tell,
            is_stopped=interrupt.is_stopped,
        )
        _tell(f"Worker {here.name} waits for jobs for {cpu.class_key}; sandbox: {sandbox.text}.")
        here.work()
    engine.dispose()


def _tell(line: str) -> None:
    with suppress(OSError):  # whoever read it is gone, and the job is not
        print_message(line)


def _ends_with(parent: int) -> bool:
    """Let the system end this process with its parent; return False if that ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent
