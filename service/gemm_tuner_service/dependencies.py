"""The dependencies of endpoints: the parts of the running service."""

from dataclasses import dataclass
from typing import Annotated, Self, cast

from fastapi import Depends, Request
from sqlalchemy import Engine

from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner_service.cpus import Cpus
from gemm_tuner_service.resolver import Resolver
from gemm_tuner_service.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """The parts of a service that is up."""

    engine: Engine
    repository: Repository
    key_pair: KeyPair
    cpus: Cpus
    resolver: Resolver

    @classmethod
    def start(cls, settings: Settings) -> Self:
        """Return the service with its database opened and its key read, or made.

        Raises:
            StoreFailed: the database cannot be opened, or the signing key not be read or made.
            InvalidSetting: the database's URL or the signing key cannot be used.
        """
        engine = open_database(settings.database_url)
        repository = Repository(engine)
        key_pair = KeyPair.load_or_create(settings.signing_key_path)
        return cls(
            engine=engine,
            repository=repository,
            key_pair=key_pair,
            cpus=Cpus(repository=repository, default=settings.default_cpu),
            resolver=Resolver(
                repository=repository, key_pair=key_pair, lifetime=settings.verdict_lifetime
            ),
        )


def running_service(request: Request) -> RunningService:
    """Return the service that answers `request`."""
    return cast("RunningService", request.app.state.service)


Service = Annotated[RunningService, Depends(running_service)]
