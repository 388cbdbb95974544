"""The time to spend on each m of a range, and what each step of tuning it gets of that."""

from dataclasses import dataclass

from gemm_tuner.domain.problem import Problem
from gemm_tuner.tuning.ranges.boundaries import can_be_split, first_rows
from gemm_tuner.tuning.ranges.formats import MOST_FORMATS

# Of the time for an m. The rest is for the format that is taken.
_ALONE = 1 / 2
_EXPLORING = 1 / 4
_IN_FORMAT = 1 / 4
# An m that loses much may get so many times its part, where others leave theirs over.
_MOST_MORE = 4.0
# With less for an m, little more is tried of it than a few favourites of the model.
LEAST_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What there is of some seconds for each m: to search it alone, and in formats for all."""

    budget_s: float

    @property
    def alone_s(self) -> float:
        """Return the seconds to search an m in any format."""
        return _ALONE * self.budget_s

    @property
    def explored_s(self) -> float:
        """Return the seconds to try an m in each format that promises much."""
        return _EXPLORING * self.budget_s / MOST_FORMATS

    def in_format_s(self, rows: int, losing: int) -> float:
        """Return what each of the m that lose much by a format gets of the time of all `rows`."""
        return min(_MOST_MORE, rows / max(1, losing)) * _IN_FORMAT * self.budget_s


def budget_of_each(problem: Problem, budget_s: float) -> float | None:
    """Return the seconds for each m of a range that is tuned within some seconds in all.

    Half of the time is for the comparisons, and for m between those that are tuned first. None
    where m is no range, or the time does not suffice to split it.
    """
    each_s = budget_s / (2 * len(first_rows(problem.m)))
    return each_s if can_be_split(problem.m) and each_s >= LEAST_S else None
