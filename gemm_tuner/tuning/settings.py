"""The settings of a sweep: its time, its compiler, its baseline."""

from dataclasses import dataclass, field
from datetime import datetime
from math import inf

from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.strategies.table import Plan
from gemm_tuner.tuning.attempt import Render


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """How to sweep: the time for one problem, all contexts together, and with what.

    With `again`, everything is timed anew, whatever was timed before. A library that takes longer
    than `race_s` to load is not raced for the baseline; by default, a share of the budget. With
    `tries_all_chosen`, candidates that were chosen are tried whatever the budget, and, if they are
    no more than finalists, in a final at once. With `stops_preparing`, a sweep that is stopped
    before it can try anything ends there, with `PreparationStopped`, and not when it can. A sweep
    that began `since` a time, and may have been cut off, goes on from the final that it timed and
    from what it confirmed; any other times these anew. The `plan` says by which strategy it
    searches.
    """

    toolchain: Toolchain
    budget_s: float = 30.0
    baseline: str = "auto"
    again: bool = False
    race_s: float | None = None
    tries_all_chosen: bool = False
    stops_preparing: bool = False
    since: datetime | None = None
    plan: Plan = field(default_factory=Plan)
    render: Render = field(default=render)

    def __post_init__(self) -> None:
        """Check the budget."""
        if not 0 < self.budget_s < inf:
            raise InvalidSetting(
                f"budget {self.budget_s} s cannot be used; give a positive time such as 30s."
            )
