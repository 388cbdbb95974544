"""`gemm-tuner dispatch`: place the jobs of a database on the workers of a fleet."""

import signal
import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt
from gemm_tuner.cli.terminal.output import print_message
from gemm_tuner.fleet.dispatcher import Dispatcher
from gemm_tuner.fleet.engine import DaskEngine
from gemm_tuner.fleet.library import load_distributed
from gemm_tuner.fleet.scheduler import scheduler_of
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.sql.database import open_database

_EVERY_S = 0.5
_NOTICE = b"Stopping; jobs that run go on, and those that wait are kept.\n"


def dispatch(
    scheduler: Annotated[
        str,
        typer.Option(
            "--scheduler",
            metavar="URL",
            help="Scheduler of the fleet: tls://HOST:PORT, or tcp:// on this machine",
        ),
    ],
    tls_ca: options.TlsAuthority = None,
    tls_cert: options.TlsCertificate = None,
    tls_key: options.TlsKey = None,
    db: options.DatabaseUrl = None,
) -> None:
    """Place waiting jobs on the workers of a fleet until stopped by Ctrl-C."""
    fleet = scheduler_of(scheduler, authority=tls_ca, certificate=tls_cert, key=tls_key)
    load_distributed()
    engine = open_database(db)
    dispatcher = Dispatcher(
        jobs=Jobs(engine),
        connect=lambda: DaskEngine(fleet, print_message),
        tell=print_message,
        now=lambda: datetime.now(UTC),
    )
    print_message(f"Placing jobs on the workers of {fleet.address}.")
    with StopOnInterrupt(signal.SIGINT, signal.SIGTERM, notice=_NOTICE) as interrupt:
        try:
            while not interrupt.is_stopped():
                dispatcher.step()
                time.sleep(_EVERY_S)
        finally:
            dispatcher.close()
    engine.dispose()
