"""Dask, loaded where it is needed: it takes a third of a second, and is optional."""

import logging
from types import ModuleType
from typing import Any

from gemm_tuner.errors import InvalidSetting, MissingCapability
from gemm_tuner.fleet.scheduler import Scheduler

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
