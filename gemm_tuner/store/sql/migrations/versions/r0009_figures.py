"""Keep figures beside verdicts, for pages that tell of many; the next deriving fills them."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "figures"
down_revision = "answers"

_COLUMNS: tuple[tuple[str, sa.types.TypeEngine[Any]], ...] = (
    ("layer", sa.String(64)),
    ("types", sa.String(64)),
    ("weights", sa.BigInteger()),
    ("standing", sa.String(16)),
    ("log_ratio", sa.Double()),
    ("peak_share", sa.Double()),
    ("call_ns", sa.Double()),
)
_INDEXES = {
    "ix_verdicts_layer": ["layer", "cpu_key", "threads", "regime", "m_high"],
    "ix_verdicts_of_cpu": [
        "cpu_key",
        "log_ratio",
        "problem_id",
        "threads",
        "regime",
        "standing",
    ],
    "ix_verdicts_figures": [
        "cpu_key",
        "types",
        "threads",
        "regime",
        "standing",
        "attested_by",
        "m_high",
        "weights",
        "log_ratio",
        "peak_share",
    ],
}
_OF_TRIALS = ["problem_id", "cpu_id", "threads", "regime"]
_IN_ORDER = [*_OF_TRIALS, "origin", "sequence"]


def upgrade() -> None:
    """Add the columns and their indexes, and let trials of a question be read in their order."""
    for name, kind in _COLUMNS:
        op.add_column("verdicts", sa.Column(name, kind, nullable=True))
    for name, columns in _INDEXES.items():
        op.create_index(name, "verdicts", columns)
    op.create_index(f"ix_trials_{'_'.join(_IN_ORDER)}", "trials", _IN_ORDER)
    op.drop_index(f"ix_trials_{'_'.join(_OF_TRIALS)}", "trials")


def downgrade() -> None:
    """Drop them."""
    op.create_index(f"ix_trials_{'_'.join(_OF_TRIALS)}", "trials", _OF_TRIALS)
    op.drop_index(f"ix_trials_{'_'.join(_IN_ORDER)}", "trials")
    for name in _INDEXES:
        op.drop_index(name, "verdicts")
    for name, _kind in _COLUMNS:
        op.drop_column("verdicts", name)
