"""Fixtures shared by the unit tests."""

import pytest
from hypothesis import settings
from sqlalchemy import Engine

from gemm_tuner.store.repository import Repository

# The same examples each time, however long a busy machine takes for one.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture
def repository(engine: Engine) -> Repository:
    """Return the repository of a new database."""
    return Repository(engine)
