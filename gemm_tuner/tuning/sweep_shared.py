"""Kernels for several m that read one packed copy of the weights: search within shared formats."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.packed_format import packed_format
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage
from gemm_tuner.errors import NoKernelFamily
from gemm_tuner.select.shared_weights import Sharing, check_sharing, share
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import predict_cycles
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.earlier import earlier_trials
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep

SHARE_OF_BUDGET = 1 / 3
_FORMATS = 3
_BEST_OF_EACH = 3


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
    formats = _promising_formats(
        [
            _timed(
                Space(problem=problem, cpu=cpu, threads=context.threads, regime=context.regime),
                context,
                repository,
                settings.toolchain,
            )
            for problem in problems
        ],
        max_loss,
    )
    one_search = replace(settings, budget_s=settings.budget_s / _FORMATS)
    searches_left = len(formats) * len(problems)

    def show(step: Progress) -> None:
        later_s = searches_left * one_search.budget_s
        on_progress(replace(step, remaining_s=step.remaining_s + later_s))

    sharing = share(repository, problems, cpu=cpu, context=context, max_loss=max_loss)
    for like in formats:
        if len(sharing.formats) == 1:
            break
        for problem in problems:
            searches_left -= 1
            space = Space(
                problem=problem,
                cpu=cpu,
                threads=context.threads,
                like=like,
                regime=context.regime,
            )
            if is_stopped() or _is_empty(space):
                continue
            sweep(
                problem,
                contexts=[context],
                cpu=cpu,
                repository=repository,
                settings=one_search,
                on_progress=show,
                is_stopped=is_stopped,
                like=like,
            )
        sharing = share(repository, problems, cpu=cpu, context=context, max_loss=max_loss)
    return sharing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """What the sweep of one problem timed: the greatest speed of each format, and an example.

    A kernel was `confirmed` in some of the formats.
    """

    space: Space
    speeds: dict[str, float] = field(default_factory=dict)
    examples: dict[str, Candidate] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)

    def best(self) -> list[str]:
        """Return the fastest formats."""
        return sorted(self.speeds, key=lambda name: -self.speeds[name])[:_BEST_OF_EACH]

    def expected_loss(self, name: str, like: Candidate) -> float:
        """Return the share of the greatest speed that a format costs, by the model if not timed."""
        if name in self.speeds:
            return 1.0 - self.speeds[name] / max(1.0, *self.speeds.values())
        in_format = replace(self.space, like=like)
        if _is_empty(in_format):
            return 1.0
        return max(0.0, 1.0 - _fewest_cycles(self.space) / _fewest_cycles(in_format))

    def is_searched(self, name: str, like: Candidate) -> bool:
        """Return whether there is nothing to search in a format any more."""
        return name in self.confirmed or _is_empty(replace(self.space, like=like))


def _promising_formats(timed: Sequence[_Timed], max_loss: float) -> list[Candidate]:
    """Return a candidate of each format to search: those in which the fewest lose too much."""
    examples = {name: like for one in timed for name, like in one.examples.items()}
    searched = {
        name for name, like in examples.items() if all(one.is_searched(name, like) for one in timed)
    }

    def expected(name: str) -> tuple[int, float]:
        losses = [one.expected_loss(name, examples[name]) for one in timed if one.speeds]
        return sum(loss > max_loss for loss in losses), sum(losses)

    promising = {name for one in timed for name in one.best()} - searched
    ranked = sorted(promising, key=lambda name: (expected(name), name))
    return [examples[name] for name in ranked[: max(0, _FORMATS - len(searched))]]


def _timed(
    space: Space, context: ExecutionContext, repository: Repository, toolchain: Toolchain
) -> _Timed:
    measured = [
        (trial, trial.measurement)
        for trial in earlier_trials(repository, space.problem, space.cpu, toolchain)
        if trial.context == context and trial.measurement is not None
    ]
    found = _Timed(space=space)
    for trial, measurement in measured:
        if measurement.baseline == measured[-1][1].baseline:
            family = family_named(trial.candidate.micro_kernel.family)
            name = packed_format(space.problem, trial.candidate, family)
            found.speeds[name] = max(found.speeds.get(name, 0.0), measurement.ratio.median)
            found.examples[name] = trial.candidate
            if trial.stage is Stage.CONFIRM and trial.generator == generator_version():
                found.confirmed.add(name)
    return found


def _is_empty(space: Space) -> bool:
    try:
        return not space.defaults()
    except NoKernelFamily:
        return True


def _fewest_cycles(space: Space) -> float:
    return min(
        predict_cycles(space.problem, one, family_named(one.micro_kernel.family), space.cpu)
        for one in space.defaults()
    )
