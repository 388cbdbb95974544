"""Keep how a search ended that was for one format of packed weights alone."""

import sqlalchemy as sa
from alembic import op

revision = "formats"
down_revision = "quorum"

_KEY = ("problem_id", "cpu_key", "threads", "regime", "toolchain", "generator", "baseline")


def upgrade() -> None:
    """Add the format to the key: the ends that are there are of searches in all formats."""
    with op.batch_alter_table("sweep_ends") as batch:
        batch.add_column(
            sa.Column("packed_format", sa.String(256), nullable=False, server_default="")
        )
        batch.drop_constraint("pk_sweep_ends", type_="primary")
        batch.create_primary_key("pk_sweep_ends", [*_KEY, "packed_format"])


def downgrade() -> None:
    """Forget the ends in single formats, and drop the column."""
    op.execute("DELETE FROM sweep_ends WHERE packed_format <> ''")
    with op.batch_alter_table("sweep_ends") as batch:
        batch.drop_constraint("pk_sweep_ends", type_="primary")
        batch.drop_column("packed_format")
        batch.create_primary_key("pk_sweep_ends", [*_KEY])
