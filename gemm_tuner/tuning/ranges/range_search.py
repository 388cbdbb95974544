"""The searches for a range of m: each m alone, then all in one format of packed weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

from gemm_tuner.derive import derive_verdict, is_believed
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.layer_problems import MAX_LOSS
from gemm_tuner.domain.packed_format import packed_format
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.errors import TrialFailed
from gemm_tuner.select.measured_range import at_rows
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.earlier import earlier_trials
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.ranges.boundaries import Shape, price_of_losses
from gemm_tuner.tuning.ranges.formats import (
    TimedFormats,
    is_empty,
    ranked_formats,
    same_tile_in_format,
    timed_formats,
)
from gemm_tuner.tuning.ranges.range_budget import Budgets
from gemm_tuner.tuning.result import last_timed_together
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep

_SEEDS = 2
_MOST_EXPLORED = 5
_FEW = 4  # kernels of each m in a format that is explored
_CAREFUL = (Stage.FINAL, Stage.CONFIRM)

Format = tuple[str, str]  # a family, and its format of packed weights


class Stopped(Exception):
    """The user stopped it; what was found is kept."""


@dataclass(slots=True, kw_only=True)
class RangeSearch:
    """What is searched for a range, and what is known of it; `alone` is the best of each m.

    `explored` are examples of formats in which a few kernels of each m were tried, and `searched`
    are those in which an m was searched.

    `settings.budget_s` is the time for each m. Each search is a sweep that is stored, so that a
    second one goes on.
    """

    problem: Problem
    context: ExecutionContext
    cpu: Cpu
    repository: Repository
    settings: SweepSettings
    on_progress: Callable[[Progress], None]
    is_stopped: Callable[[], bool]
    alone: dict[int, Candidate] = field(default_factory=dict)
    explored: dict[str, Candidate] = field(default_factory=dict)
    searched: set[tuple[int, Format]] = field(default_factory=set)
    budgets: Budgets = field(init=False)

    def __post_init__(self) -> None:
        """Share out the time for each m."""
        self.budgets = Budgets(budget_s=self.settings.budget_s)

    def check(self) -> None:
        """Raise `Stopped` if the user stopped it."""
        if self.is_stopped():
            raise Stopped

    def _tune(
        self,
        m: int,
        budget_s: float,
        *,
        later_s: float,
        like: Candidate | None = None,
        seeds: Sequence[Candidate] = (),
        chosen: Sequence[Candidate] = (),
    ) -> Candidate | None:
        """Sweep one m, from which on all that was tried is in the store, and return the best."""
        self.check()
        (result,) = sweep(
            at_rows(self.problem, m),
            contexts=[self.context],
            cpu=self.cpu,
            repository=self.repository,
            settings=replace(self.settings, budget_s=budget_s, tries_all_chosen=bool(chosen)),
            on_progress=lambda step: self.on_progress(
                replace(
                    step, stage=f"m = {m}, {step.stage}", remaining_s=step.remaining_s + later_s
                )
            ),
            is_stopped=self.is_stopped,
            like=like,
            seeds=seeds,
            chosen=chosen,
        )
        self.check()
        return result.verdict.candidate

    def tune_alone(self, rows: Sequence[int]) -> None:
        """Search each m for itself.

        The greatest first: where memory does not suffice for it, nothing is tuned in vain.

        Raises:
            TrialFailed: nothing was confirmed for one.
            GemmTunerError: as in a sweep.
        """
        for place, m in enumerate(sorted(rows, reverse=True)):
            later_s = (len(rows) - place - 1) * self.settings.budget_s
            found = self._tune(m, self.budgets.alone_s, later_s=later_s)
            if found is None:
                raise TrialFailed(
                    f"no kernel was confirmed for m = {m} of {self.problem.text!r}; give more "
                    "--budget."
                )
            self.alone[m] = found

    def explore_formats(self, rows: Sequence[int]) -> None:
        """Try a few kernels of each m in the formats that promise to cost all of them least.

        Those that were explored before are tried at these `rows`; then the most promising, as long
        as that is another one: what was tried may speak for it.
        """
        for name, like in self.explored.items():
            self._explore(rows, name, like)
        while len(self.explored) < _MOST_EXPLORED:
            timed = [self._timed_formats(m) for m in self.alone]
            name, like = next(iter(ranked_formats(timed, price_of_losses).items()))
            if name in self.explored:
                break
            self.explored[name] = like
            self._explore(tuple(self.alone), name, like)

    def _explore(self, rows: Sequence[int], name: str, like: Candidate) -> None:
        """Try what is best in a format at the nearest m, and what the model expects most of."""
        budget_s = self.budgets.explored_s
        for place, m in enumerate(rows):
            space = replace(self.space(m), like=like)
            if not self._timed_formats(m).is_searched(name, like):
                few = dict.fromkeys((*self._seeds(space), *shortlist(space, _FEW)))
                later_s = (len(rows) - place - 1) * budget_s
                self._tune(m, budget_s, later_s=later_s, like=like, chosen=[*few][:_FEW])

    def _timed_formats(self, m: int) -> TimedFormats:
        return timed_formats(self.space(m), self.context, self.repository, self.settings.toolchain)

    def search_format(self, like: Candidate) -> None:
        """Search those m in a format that lose much by it: they have the time of the others too.

        One without a kernel in the format loses all, and is left to those of its neighbours. None
        is searched twice.
        """
        wanted = self._format(like)
        rows = [m for m in self.alone if (m, wanted) not in self.searched]
        self.searched |= {(m, wanted) for m in rows}
        spaces = {m: replace(self.space(m), like=like) for m in rows}
        losing = [
            m
            for m in rows
            if self.losses(m).get(wanted, 1.0) > MAX_LOSS and not is_empty(spaces[m])
        ]
        budget_s = self.budgets.in_format_s(len(rows), len(losing))
        for place, m in enumerate(losing):
            later_s = (len(losing) - place - 1) * budget_s
            seeds = self._seeds(spaces[m])
            self._tune(m, budget_s, later_s=later_s, like=like, seeds=seeds)

    def _seeds(self, space: Space) -> tuple[Candidate, ...]:
        """Return what may be best in the format of a space.

        That is the best kernel of its m in any format, where its tile can read this one, and the
        best in the format at the nearest m, as they are for its m.
        """
        assert space.like is not None
        m, wanted = space.problem.m.high, self._format(space.like)
        found: dict[Candidate, None] = {}
        for other in sorted(self.alone, key=lambda one: (max(one, m) / min(one, m), one)):
            speeds = self.in_format(other, wanted) if other != m else {}
            if speeds:
                best = Shape.of(max(speeds, key=lambda one: speeds[one]), other).at(m)
                if best in space.cuts_of(best):
                    found[best] = None
        same_tile = same_tile_in_format(self.alone[m], space)
        return tuple(dict.fromkeys((*same_tile, *(*found,)[:_SEEDS])))

    def space(self, m: int) -> Space:
        """Return what can be generated for an m, in any format."""
        return Space(
            problem=at_rows(self.problem, m),
            cpu=self.cpu,
            threads=self.context.threads,
            regime=self.context.regime,
        )

    def timed(self, m: int) -> list[Trial]:
        """Return what was timed at an m and stands, beside the newest baseline of careful timings.

        A sweep beside another library that was stopped in its races has timed none carefully.
        """
        problem = at_rows(self.problem, m)
        trials = [
            trial
            for trial in earlier_trials(self.repository, problem, self.cpu, self.settings.toolchain)
            if trial.context == self.context
            and trial.outcome is Outcome.CORRECT
            and trial.measurement is not None
        ]
        careful = [
            trial.measurement.baseline
            for trial in trials
            if trial.measurement and trial.stage in _CAREFUL
        ]
        return [
            trial
            for trial in trials
            if trial.measurement and trial.measurement.baseline in careful[-1:]
        ]

    def _format(self, candidate: Candidate) -> Format:
        family = candidate.micro_kernel.family
        return family, packed_format(self.problem, candidate, family_named(family))

    def losses(self, m: int) -> dict[Format, float]:
        """Return what each format costs an m, of which a kernel was timed carefully there."""
        speeds = _speeds_of(self._careful(m))
        best = max(speeds.values())
        losses: dict[Format, float] = {}
        for candidate, speed in speeds.items():
            name = self._format(candidate)
            losses[name] = min(losses.get(name, 1.0), 1.0 - speed / best)
        return losses

    def best_format(self) -> tuple[Format, Candidate]:
        """Return the format with the least price of what each m loses by it, and an example.

        An m for which it has no kernel loses all.
        """
        losses = [self.losses(m) for m in self.alone]
        wanted = min(
            {name for of_one in losses for name in of_one},
            key=lambda name: (price_of_losses([one.get(name, 1.0) for one in losses]), name),
        )
        examples = (one.candidate for m in self.alone for one in self._careful(m))
        return wanted, next(one for one in examples if self._format(one) == wanted)

    def renew_alone(self) -> None:
        """Compare with the best kernel of each m that any of the searches has found."""
        for m in self.alone:
            verdict = derive_verdict(
                [one for one in self.timed(m) if one.generator == generator_version()],
                problem=at_rows(self.problem, m),
                cpu_key=self.cpu.exact_key,
                context=self.context,
                complete=False,
            )
            self.alone[m] = verdict.candidate or self.alone[m]

    def in_format(self, m: int, wanted: Format) -> dict[Candidate, float]:
        """Return the speeds that were measured carefully at an m, of kernels in the format."""
        return _speeds_of(
            [one for one in self._careful(m) if self._format(one.candidate) == wanted]
        )

    def _careful(self, m: int) -> list[Trial]:
        """Return what was timed carefully at an m, and may be believed if anything may."""
        careful = [
            one for one in self.timed(m) if one.stage in _CAREFUL and not one.candidate.below
        ]
        return [one for one in careful if is_believed(one)] or careful


def _speeds_of(trials: Sequence[Trial]) -> dict[Candidate, float]:
    """Return speeds that can be compared, of each candidate what was timed last.

    What was timed together last is compared by its ratios to the baseline in the same rounds. The
    fastest samples, which compare different rounds, may be of moments when memory was faster.
    """
    speeds = {
        trial.candidate: trial.measurement.comparable_speed
        for trial in trials
        if trial.measurement is not None
    }
    ratios = {
        trial.candidate: geometric_mean(one.ratio.median for one in trial.measurement.processes)
        for trial in last_timed_together(trials)
        if trial.measurement is not None
    }
    if len(ratios) > 1:
        fastest = max(ratios, key=lambda one: ratios[one])
        unit = speeds[fastest] / ratios[fastest]
        speeds |= {candidate: unit * ratio for candidate, ratio in ratios.items()}
    return speeds
