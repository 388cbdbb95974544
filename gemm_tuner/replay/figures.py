"""What many searches on recordings say of a strategy."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean, median

from gemm_tuner.replay.replaying import Run, is_near_best

TIMES_S = (2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What `runs` searches say; times in seconds, infinite where most never came near the best.

    `regrets` are the means at `TIMES_S`. `wrong_winners` is the share of the searches that ended
    with a kernel that is more than 2 % slower than the best recorded.
    """

    runs: int
    near_best_median_s: float
    near_best_90th_s: float
    regrets: tuple[float, ...]
    tried: float
    wrong_winners: float


def figures_of(runs: Sequence[Run]) -> Figures:
    """Return the figures of some searches."""
    times_s = sorted(run.near_best_s for run in runs)
    return Figures(
        runs=len(runs),
        near_best_median_s=times_s[(len(runs) - 1) // 2],
        near_best_90th_s=times_s[ceil(0.9 * len(runs)) - 1],
        regrets=tuple(fmean(run.regret_at(time_s) for run in runs) for time_s in TIMES_S),
        tried=median(run.tried for run in runs),
        wrong_winners=fmean(not is_near_best(run.winner_regret) for run in runs),
    )
