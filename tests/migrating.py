"""Alembic, as tests call it to make and to take back old schemas."""

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from gemm_tuner.store.sql import database


def upgrade(connection: Connection) -> None:
    """Bring a schema to the newest revision, by migrations alone."""
    command.upgrade(_config(connection), "head")


def downgrade(connection: Connection, revision: str) -> None:
    """Take a schema back to an older revision."""
    command.downgrade(_config(connection), revision)


def _config(connection: Connection) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(database.MIGRATIONS))
    return config
