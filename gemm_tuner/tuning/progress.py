"""How far a sweep is: what its caller is told while it runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a sweep is: `done` of about `total` candidates, the best speed over the baseline's.

    `remaining_s` is what is left of the budget for all contexts. Of the candidates that are done,
    some `failed`; a call of the best takes `best_ns`.
    """

    stage: str
    done: int
    total: int
    best_ratio: float | None
    remaining_s: float
    failed: int = 0
    best_ns: float | None = None
