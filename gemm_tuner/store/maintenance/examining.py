"""Looking at a database without changing it, not even its schema."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, Engine, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.maintenance.checking import CheckReport, check_newest
from gemm_tuner.store.sql.database import (
    MIGRATIONS,
    database_file,
    newest_revision,
    parse_url,
    reason_of,
    shown,
)
from gemm_tuner.store.sql.postgresql import create_postgresql_engine
from gemm_tuner.store.sql.scan import count_rows, snapshot
from gemm_tuner.store.sql.sqlite import create_reading_engine
from gemm_tuner.store.sql.tables import Origin, problems, trials, verdicts

_VERSIONS = MIGRATIONS / "versions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a database of the newest schema holds, and what was found wrong with some rows of it.

    `verdicts_here` are those for one CPU. `newest_at` is when the last trial was made.
    """

    problems: int
    trials: int
    verdicts_here: int
    newest_at: datetime | None
    sample: CheckReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The revision of a database's schema, and its contents where that is the newest."""

    revision: str
    contents: Contents | None

    @property
    def is_known(self) -> bool:
        """Return whether this version of the package knows the schema, or how to update it."""
        return any(
            path.stem.partition("_")[2] == self.revision for path in _VERSIONS.glob("r[0-9]*.py")
        )


def shown_url(url: str) -> str:
    """Return a URL as messages show it, without its passwords.

    Raises:
        InvalidSetting: `url` is not a database URL, or its driver is not installed.
    """
    return shown(parse_url(url))


def examine_database(url: str, *, cpu_key: str, rows_of_each: int) -> Examination | None:
    """Return what is in the database at `url`, None if there is none; nothing is written.

    Of each table, `rows_of_each` rows at most are checked.

    Raises:
        InvalidSetting: `url` is not a database URL, or its driver is not installed.
        StoreFailed: the database cannot be read, or is none of gemm-tuner.
    """
    file = database_file(url)
    parsed = parse_url(url)
    if file is None and parsed.get_backend_name() == "sqlite":  # in memory
        return None
    try:
        if file is not None and not file.exists():
            return None
        if file is not None and not file.is_file():
            raise StoreFailed(f"the database {shown(parsed)} cannot be read: it is no plain file.")
        with _disposed(
            create_postgresql_engine(parsed)
            if file is None
            else create_reading_engine(parsed, file)
        ) as engine:
            return _examine(engine, cpu_key, rows_of_each)
    except (OSError, SQLAlchemyError) as error:
        raise StoreFailed(
            f"the database {shown(parsed)} cannot be read: {reason_of(error)}; check that it is "
            "one of gemm-tuner and may be read, or name another with --db or GEMM_TUNER_DB."
        ) from error


@contextmanager
def _disposed(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.dispose()


def _examine(engine: Engine, cpu_key: str, rows_of_each: int) -> Examination:
    with engine.connect() as connection:
        revision = str(connection.scalar(text("SELECT version_num FROM alembic_version")))
    if revision != newest_revision():
        return Examination(revision=revision, contents=None)
    sample = check_newest(engine, rows_of_each)
    with snapshot(engine) as connection:
        contents = Contents(
            problems=count_rows(connection, problems),
            trials=count_rows(connection, trials),
            verdicts_here=_count_verdicts(connection, cpu_key),
            newest_at=_newest_at(connection),
            sample=sample,
        )
    return Examination(revision=revision, contents=contents)


def _count_verdicts(connection: Connection, cpu_key: str) -> int:
    query = (
        select(func.count())
        .select_from(verdicts)
        .where(verdicts.c.cpu_key == cpu_key, verdicts.c.document.is_not(None))
    )
    return connection.execute(query).scalar_one()


def _newest_at(connection: Connection) -> datetime | None:
    """Return when the last trial was made, None if there is none, or it does not tell."""
    document = connection.scalar(
        select(trials.c.document)
        .where(trials.c.origin == Origin.MEASURED.value)  # others have other clocks
        .order_by(trials.c.sequence.desc())
        .limit(1)
    )
    try:
        moment = datetime.fromisoformat(json.loads(document or "")["created_at"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return moment if moment.tzinfo else None
