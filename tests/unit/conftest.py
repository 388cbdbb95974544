"""Fixtures shared by the unit tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from sqlalchemy import Engine

from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository

# The same examples each time, however long a busy machine takes for one.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Yield a new database."""
    engine = open_database(f"sqlite:///{tmp_path}/store.sqlite3")
    yield engine
    engine.dispose()


@pytest.fixture
def repository(engine: Engine) -> Repository:
    """Return the repository of a new database."""
    return Repository(engine)
