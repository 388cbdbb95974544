"""Keep tokens, and who changed what."""

import sqlalchemy as sa
from alembic import op

revision = "access"
down_revision = "initial"


def upgrade() -> None:
    """Create the tables of tokens and of the audit log."""
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("scopes", sa.String(256), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("expires_at", sa.String(32)),
        sa.Column("revoked_at", sa.String(32)),
        sa.PrimaryKeyConstraint("id", name="pk_tokens"),
        sa.UniqueConstraint("secret_sha256", name="uq_tokens_secret_sha256"),
    )
    op.create_table(
        "audit",
        sa.Column("sequence", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("at", sa.String(32), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_audit"),
        sqlite_autoincrement=True,
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("audit")
    op.drop_table("tokens")
