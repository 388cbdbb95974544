"""A service on a new database, with one tuned problem in it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from databases import Databases
from gemm_tuner_service.dashboard.artist import Artist
from gemm_tuner_service.dashboard.pictures import PICTURES
from gemm_tuner_service.settings import Settings
from job_site import JobSite
from pages import count_always
from serving import served, settings_of, tune
from sqlalchemy import Engine

from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database


@pytest.fixture
def settings(tmp_path: Path, databases: Databases) -> Iterator[Settings]:
    """Yield the settings of a service of one test."""
    with databases.filled(tune) as url:
        yield settings_of(url, tmp_path)


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
    with databases.filled(tune) as url, served(settings_of(url, folder)) as client:
        yield client


@pytest.fixture
def site(own_client: httpx.Client, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> JobSite:
    """Return a service whose counts are always new."""
    count_always(monkeypatch)
    own_client.get("/")  # what it counted when it began is of before
    return JobSite(own_client, engine)


class _LastingArtist(Artist):
    """A process that draws for one service after the other: to load matplotlib takes it 1 s."""

    def end(self) -> None:
        """Go on."""

    def stop(self) -> None:
        """Go on."""


@pytest.fixture(scope="session")
def artist() -> Iterator[Artist]:
    """Yield the process that draws for all tests that are patient."""
    artist = _LastingArtist()
    yield artist
    Artist.end(artist)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, artist: Artist) -> None:
    """Let pages wait for pictures, of which an earlier test has left none."""
    for kept in (PICTURES._kept, PICTURES._last):
        kept.clear()
    monkeypatch.setattr(PICTURES, "_artist", artist)
    for name in ("WAIT_S", "COLD_WAIT_S"):
        monkeypatch.setattr(f"gemm_tuner_service.dashboard.pictures.{name}", 60.0)
