"""The environment of Alembic's revisions: the caller's connection, in one transaction."""

from alembic import context

from gemm_tuner.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
)
context.run_migrations()
