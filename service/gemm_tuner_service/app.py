"""The application: settings in, endpoints out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from gemm_tuner_service.dashboard.pictures import PICTURES
from gemm_tuner_service.dashboard.render import compile_templates
from gemm_tuner_service.dashboard.shell import PageShell
from gemm_tuner_service.dependencies import RunningService
from gemm_tuner_service.middleware.access import AccessControl, ClientWork
from gemm_tuner_service.middleware.head import HeadAsGet
from gemm_tuner_service.middleware.limits import FramingControl, RequestLimits
from gemm_tuner_service.middleware.named_twice import NamesOnce
from gemm_tuner_service.middleware.observing import Observation
from gemm_tuner_service.plain_failures import PlainFailures
from gemm_tuner_service.problems import install_handlers
from gemm_tuner_service.routes import (
    artifacts,
    batch,
    contributions,
    health,
    jobs,
    kernels,
    metrics,
    misses,
    pages,
    records,
    resolve,
    revocations,
    sign_in,
)
from gemm_tuner_service.routing import show_in_openapi
from gemm_tuner_service.settings import Settings

_DESCRIPTION = (
    "Which kernel should run y = epilogue(x @ w) on this CPU? The answer is a signed verdict that "
    "names a binary by its sha256, or says that the baseline is faster. Errors are "
    "application/problem+json."
)


def create_app(settings: Settings) -> FastAPI:
    """Return the service; it opens its database and key when it is started.

    Raises at the start:
        StoreFailed: the database cannot be opened, or the signing key not be read or made.
        InvalidSetting: the database's URL or the signing key cannot be used.
    """

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = service = RunningService.start(settings)
        service.tallies.wait_for_first(meanwhile=compile_templates)
        yield
        PICTURES.stop()
        service.close()

    app = FastAPI(
        title="gemm-tuner",
        version=version("gemm-tuner"),
        description=_DESCRIPTION,
        lifespan=running,
    )
    # The last that is added is the first that a request meets.
    app.add_middleware(NamesOnce)
    app.add_middleware(ClientWork)
    app.add_middleware(RequestLimits)
    app.add_middleware(AccessControl)
    app.add_middleware(PageShell)
    app.add_middleware(HeadAsGet)
    app.add_middleware(FramingControl)
    app.add_middleware(Observation)
    app.add_middleware(PlainFailures)
    install_handlers(app)
    for routes in (
        kernels,
        batch,
        artifacts,
        revocations,
        records,
        contributions,
        jobs,
        misses,
        health,
        metrics,
        pages,
        sign_in,
    ):
        # As they are: `include_router` builds each anew, at the first request of each application.
        app.router.routes.extend(routes.router.routes)
    # The first that is tried: it is asked more than all others.
    app.router.routes[:0] = resolve.router.routes
    describe = app.openapi
    app.openapi = lambda: show_in_openapi(describe())  # type: ignore[method-assign]  # as FastAPI's manual has it
    return app
