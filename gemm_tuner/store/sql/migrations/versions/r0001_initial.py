"""Create the first tables."""

import sqlalchemy as sa
from alembic import op

revision = "initial"
down_revision = None


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "problems",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("types", sa.String(64), nullable=False),
        sa.Column("w_layout", sa.String(16), nullable=False),
        sa.Column("epilogue", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_problems"),
    )
    op.create_index("ix_problems_n_k_types_w_layout", "problems", ["n", "k", "types", "w_layout"])
    op.create_table(
        "cpus",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("exact_key", sa.String(128), nullable=False),
        sa.Column("class_key", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_cpus"),
    )
    op.create_index("ix_cpus_exact_key", "cpus", ["exact_key"])
    op.create_index("ix_cpus_class_key", "cpus", ["class_key"])
    op.create_table(
        "trials",
        sa.Column("sequence", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("origin", sa.String(16), nullable=False),
        sa.Column("problem_id", sa.String(64), nullable=False),
        sa.Column("cpu_id", sa.String(64), nullable=False),
        sa.Column("threads", sa.Integer(), nullable=False),
        sa.Column("regime", sa.String(32), nullable=False),
        sa.Column("generator", sa.String(128), nullable=False),
        sa.Column("stage", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_trials_problem_id"),
        sa.ForeignKeyConstraint(["cpu_id"], ["cpus.id"], name="fk_trials_cpu_id"),
        sa.PrimaryKeyConstraint("sequence", name="pk_trials"),
        sa.UniqueConstraint("id", name="uq_trials_id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_trials_problem_id_cpu_id_threads_regime",
        "trials",
        ["problem_id", "cpu_id", "threads", "regime"],
    )
    op.create_table(
        "sources",
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("compressed_text", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_sources"),
    )
    op.create_table(
        "artifacts",
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("source_sha256", sa.String(64), nullable=False),
        sa.Column("compressed_binary", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["source_sha256"], ["sources.sha256"], name="fk_artifacts_source_sha256"
        ),
        sa.PrimaryKeyConstraint("sha256", name="pk_artifacts"),
    )
    op.create_table(
        "sweep_ends",
        sa.Column("problem_id", sa.String(64), nullable=False),
        sa.Column("cpu_key", sa.String(128), nullable=False),
        sa.Column("threads", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("regime", sa.String(32), nullable=False),
        sa.Column("toolchain", sa.String(512), nullable=False),
        sa.Column("generator", sa.String(128), nullable=False),
        sa.Column("baseline", sa.String(128), nullable=False),
        sa.Column("is_exhausted", sa.Boolean(), nullable=False),
        sa.Column("budget_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_sweep_ends_problem_id"),
        sa.PrimaryKeyConstraint(
            "problem_id",
            "cpu_key",
            "threads",
            "regime",
            "toolchain",
            "generator",
            "baseline",
            name="pk_sweep_ends",
        ),
    )


def downgrade() -> None:
    """Drop all tables."""
    for table in ("sweep_ends", "artifacts", "sources", "trials", "cpus", "problems"):
        op.drop_table(table)
