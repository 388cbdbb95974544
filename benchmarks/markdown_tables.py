"""Rows of tables in the reports."""

from collections.abc import Iterator, Sequence


def table_head(columns: Sequence[str]) -> Iterator[str]:
    """Yield the names of the columns and the line under them."""
    yield table_row(*columns)
    yield "|---" * len(columns) + "|"


def table_row(*cells: str) -> str:
    """Return a row."""
    return f"| {' | '.join(cells)} |"


def ratio_text(ratio: float | None) -> str:
    """Return a ratio of speeds, or nothing where there is none."""
    return "" if ratio is None else f"{ratio:.3f}"
