"""The race for the baseline: how long it may take, and who won it before."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from gemm_tuner.bench.baselines.choose import AUTO, Race, raced_packages
from gemm_tuner.derive import is_believed
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.record import Trial
from gemm_tuner.tuning.settings import SweepSettings

# A library that takes more of the budget to load is not raced; if it won before, it is loaded.
_SHARE_OF_BUDGET = 0.15


def find_race(
    trials: Sequence[Trial], settings: SweepSettings, *, context: ExecutionContext
) -> Race:
    """Return how `auto` is decided in a context: by its newest race that is still good.

    A sweep with a smaller budget goes on beside the same baseline, or its kernels could not be
    compared with those that were found before. A race of a sweep that was disturbed is no good:
    another library may have won by chance.

    Args:
        trials: what earlier sweeps of the problem on this CPU gave.
        settings: the budget of the sweep.
        context: of the calls; the fastest library on one thread may not be so on several, nor
            that with hot weights with cold ones.
    """
    limit_s = _SHARE_OF_BUDGET * settings.budget_s if settings.race_s is None else settings.race_s
    race = Race(limit_s=limit_s, threads=context.threads, regime=context.regime)
    packages: Callable[[float], tuple[str, ...]] = raced_packages
    if any(trial.problem.operation.has_values for trial in trials):
        packages = partial(raced_packages, attends=True)
    wanted, installed = set(packages(limit_s)), set(packages(inf))
    for trial in reversed(trials):
        raced = trial.measurement.raced if trial.measurement else ()
        is_good = bool(raced) and wanted <= {one.package for one in raced if not one.lacked_time}
        is_alike = trial.context == context and all(one.regime is context.regime for one in raced)
        if is_good and is_alike and raced[0].package in installed:
            return replace(race, earlier=raced if is_believed(trial) else ())
    return race


def expected_baseline(settings: SweepSettings, race: Race) -> str | None:
    """Return the name of the baseline, with its version if a race has chosen it, if it is known."""
    if settings.baseline != AUTO:
        return settings.baseline
    return race.earlier[0].baseline if race.earlier else None
