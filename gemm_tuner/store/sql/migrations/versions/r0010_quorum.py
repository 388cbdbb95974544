"""Keep how many hosts must find the same, which of them need not run a job, and who a worker is."""

import sqlalchemy as sa
from alembic import op

revision = "quorum"
down_revision = "figures"


def upgrade() -> None:
    """Add the columns: one host is enough, as before."""
    op.add_column(
        "verdict_state", sa.Column("quorum", sa.Integer(), nullable=False, server_default="1")
    )
    op.add_column("jobs", sa.Column("measured_by", sa.Text(), nullable=True))
    op.add_column("workers", sa.Column("key", sa.String(64), nullable=True))


def downgrade() -> None:
    """Drop them."""
    op.drop_column("workers", "key")
    op.drop_column("jobs", "measured_by")
    op.drop_column("verdict_state", "quorum")
