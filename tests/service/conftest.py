"""A service on a new database, with one tuned problem in it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from databases import Databases
from gemm_tuner_service.settings import Settings
from serving import served, tuned_settings
from sqlalchemy import Engine

from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    """Return the settings of a service of one test."""
    return tuned_settings(tmp_path, database_url)


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
def own_client(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """Yield a client of a service whose store the test may change, and which sees it at once."""
    monkeypatch.setattr("gemm_tuner.store.watching.LOOK_EVERY_S", 0)
    with served(settings) as client:
        yield client


@pytest.fixture(scope="session")
def client(
    tmp_path_factory: pytest.TempPathFactory, databases: Databases
) -> Iterator[httpx.Client]:
    """Yield a client of a service that all tests share and none changes."""
    folder = tmp_path_factory.mktemp("service")
    with databases.current() as url, served(tuned_settings(folder, url)) as client:
        yield client
