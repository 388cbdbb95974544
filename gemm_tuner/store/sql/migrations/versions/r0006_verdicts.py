"""Store verdicts; they are derived when the database is opened."""

import sqlalchemy as sa
from alembic import op

revision = "verdicts"
down_revision = "contributions"


def upgrade() -> None:
    """Create the tables, without verdicts."""
    op.create_table(
        "verdicts",
        sa.Column("problem_id", sa.String(64), nullable=False),
        sa.Column("threads", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("regime", sa.String(32), nullable=False),
        sa.Column("model_key", sa.String(128), nullable=False),
        sa.Column("cpu_key", sa.String(128), nullable=False),
        sa.Column("class_key", sa.String(128), nullable=False),
        sa.Column("m_low", sa.Integer(), nullable=False),
        sa.Column("m_high", sa.Integer(), nullable=False),
        sa.Column("range_of", sa.String(64)),
        sa.Column("hint_of", sa.String(64)),
        sa.Column("imported", sa.Integer(), nullable=False),
        sa.Column("is_predicted", sa.Boolean(), nullable=False),
        sa.Column("newest", sa.Integer(), nullable=False),
        sa.Column("serial", sa.Integer(), nullable=False),
        sa.Column("artifact", sa.String(64)),
        sa.Column("document", sa.Text()),
        sa.Column("attested_by", sa.String(64)),
        sa.Column("attestation", sa.LargeBinary()),
        sa.Column("class_artifact", sa.String(64)),
        sa.Column("class_document", sa.Text()),
        sa.Column("class_attested_by", sa.String(64)),
        sa.Column("class_attestation", sa.LargeBinary()),
        sa.Column("lacking", sa.Text()),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_verdicts_problem_id"),
        sa.PrimaryKeyConstraint(
            "problem_id", "threads", "regime", "model_key", "cpu_key", name="pk_verdicts"
        ),
    )
    op.create_index(
        "ix_verdicts_range_of", "verdicts", ["range_of", "cpu_key", "threads", "regime"]
    )
    op.create_index("ix_verdicts_hint_of", "verdicts", ["hint_of"])
    op.create_index("ix_verdicts_lacking", "verdicts", ["lacking"])
    state = op.create_table(
        "verdict_state",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("rules", sa.Integer(), nullable=False),
        sa.Column("changes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_verdict_state"),
    )
    op.bulk_insert(state, [{"id": 1, "rules": 0, "changes": 0}])


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("verdict_state")
    op.drop_table("verdicts")
