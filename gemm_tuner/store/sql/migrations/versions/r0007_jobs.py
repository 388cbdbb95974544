"""Keep what is to be tuned, by whom it is run, and what was asked for in vain."""

import sqlalchemy as sa
from alembic import op

revision = "jobs"
down_revision = "verdicts"


def upgrade() -> None:
    """Create the tables of jobs, their keys, workers and misses."""
    op.create_table(
        "jobs",
        sa.Column("sequence", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("problem_id", sa.String(64), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("class_key", sa.String(128), nullable=False),
        sa.Column("threads", sa.Integer(), nullable=False),
        sa.Column("regime", sa.String(32), nullable=False),
        sa.Column("budget_s", sa.Double(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("changed_at", sa.String(32), nullable=False),
        sa.Column("worker", sa.String(128)),
        sa.Column("leased_until", sa.String(32)),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("tried", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("best_ns", sa.Double()),
        sa.Column("over_baseline", sa.Double()),
        sa.Column("seconds_left", sa.Double()),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("is_cancel_asked", sa.Boolean(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
        sqlite_autoincrement=True,
    )
    in_order = ["state", "class_key", "priority", "sequence"]
    op.create_index("ix_jobs_state_class_key_priority_sequence", "jobs", in_order)
    question = ["problem_id", "class_key", "threads", "regime"]
    op.create_index("ix_jobs_problem_id_class_key_threads_regime", "jobs", question)
    op.create_index("ix_jobs_owner_state", "jobs", ["owner", "state"])
    op.create_table(
        "job_keys",
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("idempotency_key", sa.String(255), nullable=False),
        sa.Column("question", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(32), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_keys_job_id"),
        sa.PrimaryKeyConstraint("owner", "idempotency_key", name="pk_job_keys"),
    )
    op.create_index("ix_job_keys_job_id", "job_keys", ["job_id"])
    op.create_table(
        "workers",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("class_key", sa.String(128), nullable=False),
        sa.Column("cpu_key", sa.String(128), nullable=False),
        sa.Column("seen_at", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(32)),
        sa.PrimaryKeyConstraint("name", name="pk_workers"),
    )
    op.create_index("ix_workers_class_key", "workers", ["class_key"])
    op.create_table(
        "misses",
        sa.Column("problem_id", sa.String(64), nullable=False),
        sa.Column("class_key", sa.String(128), nullable=False),
        sa.Column("threads", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("regime", sa.String(32), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("asked", sa.BigInteger(), nullable=False),
        sa.Column("first_at", sa.String(32), nullable=False),
        sa.Column("last_at", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("problem_id", "class_key", "threads", "regime", name="pk_misses"),
    )
    op.create_index("ix_misses_asked_last_at", "misses", ["asked", "last_at"])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("misses")
    op.drop_table("workers")
    op.drop_table("job_keys")
    op.drop_table("jobs")
