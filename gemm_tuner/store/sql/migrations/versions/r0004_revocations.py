"""Keep what was revoked."""

import sqlalchemy as sa
from alembic import op

revision = "revocations"
down_revision = "attestations"


def upgrade() -> None:
    """Create the table of revocations."""
    op.create_table(
        "revocations",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("is_lifted", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_revocations"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_revocations_subject", "revocations", ["subject"])


def downgrade() -> None:
    """Drop the table of revocations."""
    op.drop_table("revocations")
