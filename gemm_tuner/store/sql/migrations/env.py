"""The environment of Alembic's revisions: the caller's connection, in one transaction."""

from alembic import context

from gemm_tuner.store.sql.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    transactional_ddl=True,
)
context.run_migrations()
