"""Which ranges of m are tuned as several kernels without being asked to."""

import pytest

from gemm_tuner.domain.rows import Rows
from gemm_tuner.tuning.ranges.wide_range import budgets_of, is_wide


@pytest.mark.parametrize(
    ("rows", "wide", "budgets"),
    [
        ("7", False, 1),
        ("1..4", False, 1),
        ("1..5", True, 8),  # at 1, 2, 3 and 5, searched and compared
        ("0..4", False, 1),  # nothing is tuned at 0
        ("17..64", False, 1),
        ("1..64", True, 16),
        ("1..4096", True, 28),
    ],
)
def test_a_range_is_wide_where_one_kernel_loses_much_at_some_m(
    rows: str,
    *,
    wide: bool,
    budgets: int,
) -> None:
    parsed = Rows.parse(rows)

    assert is_wide(parsed) is wide
    assert budgets_of(parsed) == budgets
