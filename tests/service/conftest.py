"""A service on a new database, with one tuned problem in it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gemm_tuner_service.settings import Settings
from samples import CPU, add_build, make_trial
from serving import served
from sqlalchemy import Engine

from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository


def make_settings(folder: Path) -> Settings:
    """Return the settings of a service whose store holds one tuned problem."""
    url = f"sqlite:///{folder}/store.sqlite3"
    engine = open_database(url)
    repository = Repository(engine)
    add_build(repository)
    repository.add_trial(make_trial())
    engine.dispose()
    return Settings(
        database_url=url, signing_key_path=folder / "keys" / "signing.pem", default_cpu=CPU
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Return the settings of a service of one test."""
    return make_settings(tmp_path)


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    """Yield the database of the service of one test."""
    engine = open_database(settings.database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def repository(engine: Engine) -> Repository:
    """Return the store of the service of one test."""
    return Repository(engine)


@pytest.fixture
def own_client(settings: Settings) -> Iterator[httpx.Client]:
    """Yield a client of a service whose store the test may change."""
    with served(settings) as client:
        yield client


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Yield a client of a service that all tests share and none changes."""
    with served(make_settings(tmp_path_factory.mktemp("service"))) as client:
        yield client
