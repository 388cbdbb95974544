"""Kernels for several m that read one packed copy of the weights: search within shared formats."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.layer_problems import check_sharing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.select.shared_weights import Sharing, share
from gemm_tuner.space.candidates import Space
from gemm_tuner.store.repository import Repository
from gemm_tuner.strategies.local_search import FAVOURITES
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.ranges.formats import (
    MOST_FORMATS,
    is_empty,
    promising_formats,
    timed_formats,
)
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep

SHARE_OF_BUDGET = 1 / 3

# Each search prepares a server of its own, which takes longer than a short search.
_BEFORE_A_SEARCH = Progress(
    stage="preparing", done=0, total=FAVOURITES, best_ratio=None, remaining_s=0.0
)


def split_budget(settings: SweepSettings) -> tuple[SweepSettings, SweepSettings]:
    """Return the settings with which to sweep each problem, and those for `sweep_shared`."""
    shared_s = settings.budget_s * SHARE_OF_BUDGET
    return (
        replace(settings, budget_s=settings.budget_s - shared_s),
        replace(settings, budget_s=shared_s),
    )


def sweep_shared(
    problems: Sequence[Problem],
    *,
    context: ExecutionContext,
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    max_loss: float,
    on_progress: Callable[[Progress], None],
    is_stopped: Callable[[], bool],
) -> Sharing:
    """Search kernels for each problem in the formats that promise to serve all; choose of them.

    The problems were swept before. `settings.budget_s` is the time for each of them; the search
    ends when one format serves all, or the few that promise most were searched. What was confirmed
    in a format is not searched again.

    Raises:
        InvalidSetting: the problems do not have the same weights, or are too many, or the loss is
            not a share.
    """
    check_sharing(problems, max_loss)
    timed = [
        timed_formats(
            Space(problem=problem, cpu=cpu, threads=context.threads, regime=context.regime),
            context,
            repository,
            settings.toolchain,
        )
        for problem in problems
    ]
    formats = promising_formats(
        timed, lambda losses: (sum(loss > max_loss for loss in losses), sum(losses))
    )
    one_search = replace(settings, budget_s=settings.budget_s / MOST_FORMATS)
    searches_left = len(formats) * len(problems)

    def show(step: Progress, m: str) -> None:
        later_s = searches_left * one_search.budget_s
        on_progress(
            replace(step, stage=f"m = {m}, {step.stage}", remaining_s=step.remaining_s + later_s)
        )

    sharing = share(repository, problems, cpu=cpu, context=context, max_loss=max_loss)
    for like in formats:
        if len(sharing.formats) == 1:
            break
        for problem, alone, shared in zip(problems, timed, sharing.kernels, strict=True):
            searches_left -= 1
            best = shared.best.verdict.candidate
            if best and best.below:  # a search of the range would find one kernel
                continue
            space = Space(
                problem=problem,
                cpu=cpu,
                threads=context.threads,
                like=like,
                regime=context.regime,
            )
            if is_stopped() or is_empty(space):
                continue
            show(_BEFORE_A_SEARCH, problem.m.text)
            sweep(
                problem,
                contexts=[context],
                cpu=cpu,
                repository=repository,
                settings=one_search,
                on_progress=partial(show, m=problem.m.text),
                is_stopped=is_stopped,
                like=like,
                seeds=alone.same_tile(space),
            )
        sharing = share(repository, problems, cpu=cpu, context=context, max_loss=max_loss)
    return sharing
