"""New databases for tests: SQLite in each stage, and PostgreSQL in the second."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Protocol

import pytest
from postgres import PostgresServer, find_programs, postgres_server
from restricted import full_disk
from sqlalchemy import URL, Engine, create_engine

from gemm_tuner.store.sql import database
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.sql.sqlite import create_sqlite_engine

# Adds rows to the database of a URL.
Filling = Callable[[str], None]


class Databases(Protocol):
    """Makes databases of one kind. Each has a URL, and is removed in the end."""

    def empty(self) -> AbstractContextManager[str]:
        """Yield a database without tables."""

    def current(self) -> AbstractContextManager[str]:
        """Yield a database with the tables of the newest schema."""

    def filled(self, fill: Filling) -> AbstractContextManager[str]:
        """Yield a database with the rows that `fill` adds; it is called once, and then copied."""

    def full_disk(self, size_bytes: int) -> AbstractContextManager[None]:
        """Let no file of a database grow beyond a size, for connections that begin now."""


class SqliteDatabases:
    """Makes SQLite databases in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self._filled: dict[Filling, Path] = {}

    @contextmanager
    def empty(self) -> Iterator[str]:
        """Yield a file that does not exist yet."""
        yield f"sqlite:///{self._folder}/{next(self._numbers)}/store.sqlite3"

    def current(self) -> AbstractContextManager[str]:
        """Yield a copy of a file with the tables."""
        return self.filled(_make_tables)

    @contextmanager
    def filled(self, fill: Filling) -> Iterator[str]:
        """Yield a copy of a file with these rows."""
        if fill not in self._filled:
            self._filled[fill] = self._folder / f"filled_{len(self._filled)}.sqlite3"
            fill(f"sqlite:///{self._filled[fill]}")
        path = self._folder / str(next(self._numbers)) / "store.sqlite3"
        path.parent.mkdir()
        shutil.copy(self._filled[fill], path)
        yield f"sqlite:///{path}"

    def full_disk(self, size_bytes: int) -> AbstractContextManager[None]:
        """Let no file of this process grow beyond a size."""
        return full_disk(size_bytes)


class PostgresDatabases:
    """Makes databases on a server."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._numbers = count()
        self._filled: dict[Filling, str] = {}

    def empty(self) -> AbstractContextManager[str]:
        """Yield a database without tables."""
        return self._new("template0")

    def current(self) -> AbstractContextManager[str]:
        """Yield a copy of a database with the tables."""
        return self.filled(_make_tables)

    def filled(self, fill: Filling) -> AbstractContextManager[str]:
        """Yield a copy of a database with these rows."""
        if fill not in self._filled:
            self._filled[fill] = f"filled_{len(self._filled)}"
            self._server.run_sql(f"CREATE DATABASE {self._filled[fill]}")
            fill(self._server.url(self._filled[fill]))
        return self._new(self._filled[fill])

    @contextmanager
    def full_disk(self, size_bytes: int) -> Iterator[None]:
        """Let no file of the server grow beyond a size."""
        self._server.let_files_grow_to(size_bytes)
        yield
        self._server.let_files_grow_to("unlimited")

    @contextmanager
    def _new(self, template: str) -> Iterator[str]:
        name = f"test_{next(self._numbers)}"
        self._server.run_sql(f"CREATE DATABASE {name} TEMPLATE {template}")
        yield self._server.url(name)
        self._server.run_sql(f"DROP DATABASE {name} WITH (FORCE)")


def _make_tables(url: str) -> None:
    open_database(url).dispose()


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Let engines of SQLite share compiled statements: each of the many in tests has its own.

    A compiled statement belongs to a dialect, so they share that too.
    """
    example = create_engine("sqlite://")
    example.connect().close()  # which prepares the dialect
    compiled: dict[object, object] = {}

    def create(url: URL) -> Engine:
        engine = create_sqlite_engine(url)
        engine.dialect = example.dialect
        engine.update_execution_options(compiled_cache=compiled)
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(database._ENGINES, "sqlite", create)
        yield
    example.dispose()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Yield the server of this process, which keeps nothing through a crash."""
    with postgres_server(programs()) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_databases(postgres: PostgresServer) -> PostgresDatabases:
    """Return what makes databases on the server of this process."""
    return PostgresDatabases(postgres)


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """Yield a server of one test, which may stop, crash and start it."""
    with postgres_server(programs(), is_durable=True) as server:
        yield server


@pytest.fixture(
    scope="session", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.proof)]
)
def databases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Databases:
    """Return what makes databases: of SQLite, and in the second stage of PostgreSQL too.

    Between tests of the two kinds, in whatever order they come, the server's databases stay.
    """
    if request.param == "sqlite":
        return SqliteDatabases(tmp_path_factory.mktemp("databases"))
    databases: PostgresDatabases = request.getfixturevalue("postgres_databases")
    return databases


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an SQLite database without records, to copy: to make one takes a tenth of a second."""
    path = tmp_path_factory.mktemp("empty") / "gemm-tuner.sqlite3"
    _make_tables(f"sqlite:///{path}")
    return path


@pytest.fixture
def store_url(tmp_path: Path, empty_store: Path) -> str:
    """Return the URL of an SQLite database without records in the test's own folder."""
    return f"sqlite:///{shutil.copy(empty_store, tmp_path / 'store.sqlite3')}"


@pytest.fixture
def empty_url(databases: Databases) -> Iterator[str]:
    """Yield the URL of a database without tables."""
    with databases.empty() as url:
        yield url


@pytest.fixture
def database_url(databases: Databases) -> Iterator[str]:
    """Yield the URL of a database with the tables of the newest schema."""
    with databases.current() as url:
        yield url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """Yield a new database."""
    engine = open_database(database_url)
    yield engine
    engine.dispose()


def programs() -> Path:
    """Return the folder of PostgreSQL's programs, or skip the test."""
    programs = find_programs()
    if programs is None:
        pytest.skip("no PostgreSQL server is installed; Debian's package postgresql has one")
    return programs
