"""`gemm-tuner worker`: run the jobs of a database on this machine."""

import ctypes
import os
import signal
from contextlib import suppress
from typing import Annotated

import typer

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.scheduler import fleet_of
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt
from gemm_tuner.cli.terminal.output import print_message
from gemm_tuner.fleet.scheduler import Scheduler
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.urgency import lower_urgency
from gemm_tuner.sandbox.confine import needed_sandbox
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.trust.attestation import MeasuringKeys
from gemm_tuner.tuning.worker import Worker

_PR_SET_PDEATHSIG = 1  # Linux, include/uapi/linux/prctl.h
_NOTICE = b"Stopping after what is in flight; a job goes back, for another worker.\n"


def worker(
    db: options.DatabaseUrl = None,
    compiler: options.Compiler = None,
    *,
    scheduler: options.SchedulerAddress = None,
    tls_ca: options.TlsAuthority = None,
    tls_cert: options.TlsCertificate = None,
    tls_key: options.TlsKey = None,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
) -> None:
    """Tune what a service is asked for, one job after the other, until stopped by Ctrl-C.

    With --scheduler, it runs the jobs that the fleet places on it, instead of looking for them.
    """
    if parent is not None and not _ends_with(parent):
        return
    fleet = fleet_of(scheduler, tls_ca, tls_cert, tls_key)
    toolchain = find_toolchain(compiler)
    sandbox = needed_sandbox()
    cpu = detect_cpu()
    engine = open_database(db)
    lower_urgency()  # what answers on this machine, or works, goes first
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
        if fleet is None:
            here.work()
        else:
            _work_in_fleet(here, fleet)
    engine.dispose()


def _work_in_fleet(here: Worker, fleet: Scheduler) -> None:
    from gemm_tuner.fleet.member import FleetWorker  # noqa: PLC0415 - its library is optional

    _tell(f"It attests what it measures with the key {MeasuringKeys().own_made()}.")
    FleetWorker(worker=here, scheduler=fleet).work()


def _tell(line: str) -> None:
    with suppress(OSError):  # whoever read it is gone, and the job is not
        print_message(line)


def _ends_with(parent: int) -> bool:
    """Let the system end this process with its parent; return False if that ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent
