"""Keep what holders of tokens contribute."""

import sqlalchemy as sa
from alembic import op

revision = "contributions"
down_revision = "revocations"


def upgrade() -> None:
    """Create the table of contributions."""
    op.create_table(
        "contributions",
        sa.Column("sequence", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("compressed", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_contributions"),
        sa.UniqueConstraint("owner", "kind", "sha256", name="uq_contributions_owner"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("contributions")
