"""Add answers that are ready to be signed; those that are there are made when next derived."""

import sqlalchemy as sa
from alembic import op

revision = "answers"
down_revision = "jobs"


def upgrade() -> None:
    """Add the column."""
    op.add_column("verdicts", sa.Column("answer", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("verdicts", "answer")
