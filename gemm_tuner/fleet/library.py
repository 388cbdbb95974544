"""Dask, loaded where it is needed: it takes a third of a second, and is optional."""

import asyncio
import logging
from types import ModuleType
from typing import Any, Self

from gemm_tuner.errors import InvalidSetting, MissingCapability
from gemm_tuner.fleet.scheduler import Scheduler

TIMEOUT_S = 5.0
_LOGGERS = (
    "distributed",
    "distributed.client",
    "distributed.gc",
    "tornado",
    "tornado.application",
    "asyncio",
)
# A profiler that samples threads a hundred times a second, and pages of plain HTTP for everyone.
_LEFT_OUT = {
    "distributed.worker.profile.enabled": False,
    "distributed.worker.http.routes": [],
    # What a scheduler could ask of a worker besides a task, and this fleet does not.
    "distributed.worker.blocked-handlers": [
        "run",
        "run_coroutine",
        "upload_file",
        "actor_execute",
        "actor_attribute",
        "plugin-add",
    ],
}


class SchedulerUnreachable(MissingCapability):
    """The scheduler of a fleet does not answer, or one of both refuses the other's certificate."""

    @classmethod
    def because(cls, scheduler: Scheduler, why: object) -> Self:
        """Return the error with its reason, which may be an error without a text."""
        reason = str(why) or f"nothing came within {TIMEOUT_S:g} s"
        return cls(
            f"the scheduler {scheduler.address} does not answer ({reason}); "
            "start it, or correct the address and the certificates."
        )


def load_distributed() -> ModuleType:
    """Return the library, set up for a fleet; it logs nothing unless it is asked to.

    Raises:
        MissingCapability: it is not installed.
    """
    try:
        import dask  # noqa: PLC0415 - optional
        import distributed  # noqa: PLC0415
    except ImportError as error:
        raise MissingCapability(
            f"a fleet needs Dask, which cannot be loaded: {error}; "
            'run pip install "gemm-tuner[fleet]".'
        ) from None
    is_debugging = logging.getLogger("gemm_tuner").isEnabledFor(logging.DEBUG)
    if not is_debugging:  # it logs each loss of a connection with a traceback
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    dask.config.set(_LEFT_OUT)
    library: ModuleType = distributed
    return library


def security_of(scheduler: Scheduler) -> Any:  # noqa: ANN401 - a type of the library
    """Return what the library takes: TLS with certificates of both sides, or nothing on loopback.

    Raises:
        MissingCapability: the library is not installed.
        InvalidSetting: a file of TLS is none, or the key is not that of the certificate.
    """
    library = load_distributed()
    if scheduler.tls is None:
        return library.Security(require_encryption=False)
    certificate, key = str(scheduler.tls.certificate), str(scheduler.tls.key)
    security = library.Security(
        require_encryption=True,
        tls_ca_file=str(scheduler.tls.authority),
        tls_client_cert=certificate,
        tls_client_key=key,
        tls_worker_cert=certificate,
        tls_worker_key=key,
    )
    try:
        security.get_connection_args("worker")
    except OSError as error:  # those of SSL are some
        raise InvalidSetting(
            f"the files of TLS cannot be used ({error}); --tls-ca, --tls-cert and --tls-key take "
            "PEM, and the key must be that of the certificate."
        ) from error
    return security


async def greet(scheduler: Scheduler) -> None:
    """Return when whoever listens greets as a scheduler does: the library waits for it for ever.

    Raises:
        MissingCapability: the library is not installed.
        InvalidSetting: a file of TLS is none, or the key is not that of the certificate.
        SchedulerUnreachable: something else answers, or nothing.
    """
    connect = load_distributed().comm.core.connect
    security = security_of(scheduler)
    try:
        connection = await asyncio.wait_for(
            connect(scheduler.address, timeout=TIMEOUT_S, **security.get_connection_args("client")),
            TIMEOUT_S,
        )
    except Exception as error:  # of any kind, where something else answers
        raise SchedulerUnreachable.because(scheduler, error) from error
    connection.abort()
