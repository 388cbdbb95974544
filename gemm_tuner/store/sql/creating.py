"""The schema of a new database, made at once: migrations would make the same step by step."""

import secrets

from sqlalchemy import (
    Column,
    Connection,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    insert,
    inspect,
)

from gemm_tuner.derive import RULES
from gemm_tuner.store.sql.tables import METADATA, verdict_state

# As Alembic makes it.
_alembic_version = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def names_in(connection: Connection) -> set[str]:
    """Return the names of all tables and views of a database, of whomever."""
    found = inspect(connection)
    return {*found.get_table_names(), *found.get_view_names()}


def create_schema(connection: Connection, revision: str) -> None:
    """Make the tables of `revision`, the newest, in a database without any.

    Raises:
        SQLAlchemyError: the database cannot be written, or has something else by such a name.
    """
    _alembic_version.create(connection, checkfirst=False)
    METADATA.create_all(connection, checkfirst=False)
    connection.execute(insert(_alembic_version).values(version_num=revision))
    # A random count of changes: it is not that of a database that was here before.
    changes = secrets.randbelow(2**32)
    connection.execute(insert(verdict_state).values(id=1, rules=RULES, changes=changes))
