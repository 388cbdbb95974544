"""Ranges of m that layers have tuned as several kernels without being asked to."""

from collections.abc import Callable

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.rows import Rows
from gemm_tuner.errors import PreparationStopped, TrialFailed
from gemm_tuner.machine.measuring_lock import is_time_over, measuring
from gemm_tuner.space.candidates import Space
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.earlier import earlier_trials
from gemm_tuner.tuning.finished import recall_finished
from gemm_tuner.tuning.progress import Progress, waiting
from gemm_tuner.tuning.race import expected_baseline, find_race
from gemm_tuner.tuning.ranges.boundaries import can_be_split, first_rows
from gemm_tuner.tuning.ranges.range_search import Stopped
from gemm_tuner.tuning.ranges.split_range import split_range
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep

# One kernel for a range that is no wider loses little.
_NARROW = 4
# Comparisons take as long as searches.
_COMPARING = 2


def is_wide(rows: Rows) -> bool:
    """Return whether one kernel loses much at some m: the greatest is over four times the least."""
    return can_be_split(rows) and rows.high > _NARROW * max(1, rows.low)


def budgets_of(rows: Rows) -> int:
    """Return how many times the time for one m it takes to tune a range or a number of rows."""
    return _COMPARING * len(first_rows(rows)) if is_wide(rows) else 1


def tune_rows(
    problem: Problem,
    *,
    context: ExecutionContext,
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    on_progress: Callable[[Progress], None],
) -> None:
    """Sweep a problem, or tune a wide range of m as one library of a few kernels.

    `settings.budget_s` is the time for each m that is tuned. A range that had as much before is not
    tuned again. Where it cannot be split, one kernel is tuned at its greatest m.

    Raises:
        PreparationStopped: the time is over that this thread may wait; what was tried is kept.
        GemmTunerError: as in a sweep.
    """
    if is_wide(problem.m):
        if _is_split(problem, context, cpu, repository, settings):
            return
        try:
            with measuring(on_wait=lambda text: on_progress(waiting(text))):
                split_range(
                    problem,
                    context=context,
                    cpu=cpu,
                    repository=repository,
                    settings=settings,
                    on_progress=on_progress,
                    is_stopped=is_time_over,
                )
        except PreparationStopped:
            raise
        except Stopped as error:
            raise PreparationStopped(f"{problem.text!r} is not split yet.") from error
        except TrialFailed:
            pass
        else:
            return
    sweep(
        problem,
        contexts=[context],
        cpu=cpu,
        repository=repository,
        settings=settings,
        on_progress=on_progress,
        is_stopped=lambda: False,
    )


def _is_split(
    problem: Problem,
    context: ExecutionContext,
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
) -> bool:
    """Return whether the answer is a library of several kernels, and would not be another now."""
    space = Space(problem=problem, cpu=cpu, threads=context.threads)
    race = find_race(
        earlier_trials(repository, problem, cpu, settings.toolchain), settings, context=context
    )
    baselines = {context: expected_baseline(settings, race)}
    found = recall_finished(space, baselines, repository, settings).get(context)
    candidate = found.verdict.candidate if found else None
    return candidate is not None and bool(candidate.below)
