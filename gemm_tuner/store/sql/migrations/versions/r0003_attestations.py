"""Add who attests a trial and an artifact; what is there is attested by nobody."""

import sqlalchemy as sa
from alembic import op

revision = "attestations"
down_revision = "access"


def upgrade() -> None:
    """Add the columns."""
    for table in ("trials", "artifacts"):
        op.add_column(table, sa.Column("attested_by", sa.String(64), nullable=True))
        op.add_column(table, sa.Column("attestation", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    """Drop the columns."""
    for table in ("trials", "artifacts"):
        op.drop_column(table, "attestation")
        op.drop_column(table, "attested_by")
