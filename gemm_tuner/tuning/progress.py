"""How far a sweep is: what its caller is told while it runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a sweep is: `done` of about `total` candidates, the best speed over the baseline's.

    `remaining_s` is what is left of the budget for all contexts.
    """

    stage: str
    done: int
    total: int
    best_ratio: float | None
    remaining_s: float
