"""The sizes of a problem: numbers that are exact, or ranges of which each call has one."""

import re
from dataclasses import dataclass

from gemm_tuner.errors import InvalidProblem

MAX_DIMENSION = 2**31 - 1

NUMBER = "-?[0-9]{1,99}"  # int() refuses thousands of digits
_ROWS = re.compile(rf"(?P<low>{NUMBER})(?:\.\.(?P<high>{NUMBER}))?")


def check_dimension(name: str, value: int) -> None:
    """Check the length of a dimension, in elements.

    Raises:
        InvalidProblem: it is negative, or more than `MAX_DIMENSION`.
    """
    if not 0 <= value <= MAX_DIMENSION:
        raise InvalidProblem(
            f"{name} = {value} is out of range; it must be from 0 to {MAX_DIMENSION}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The number of rows of x: exact, or any from `low` to `high` chosen at each call."""

    low: int
    high: int

    def __post_init__(self) -> None:
        """Check the range."""
        for value in (self.low, self.high):
            check_dimension("m", value)
        if self.low > self.high:
            raise InvalidProblem(f"m = {self.text} is an empty range; write low..high.")

    @property
    def exact(self) -> int | None:
        """Return the number of rows if it is known at build time."""
        return self.low if self.low == self.high else None

    @property
    def text(self) -> str:
        """Return `128`, or `1..64` for a range."""
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"

    def __contains__(self, rows: int) -> bool:
        return self.low <= rows <= self.high

    @classmethod
    def parse(cls, text: str) -> "Rows":
        """Return the rows written as `128` or `1..64`.

        Raises:
            InvalidProblem: `text` is neither.
        """
        match = _ROWS.fullmatch(text)
        if match is None:
            raise InvalidProblem(f"m = {text!r} is not understood; write a number, or low..high.")
        return cls(low=int(match["low"]), high=int(match["high"] or match["low"]))


def parse_columns(n: int | str) -> tuple[int | None, int]:
    """Return the least n, None where n is exact, and n.

    Raises:
        InvalidProblem: a text is neither a number nor `low..high`.
    """
    if isinstance(n, int):
        return None, n
    match = _ROWS.fullmatch(n)
    if match is None:
        raise InvalidProblem(f"n = {n[:60]!r} is not understood; write a number, or low..high.")
    low, high = int(match["low"]), match["high"]
    return (None, low) if high is None or int(high) == low else (low, int(high))
