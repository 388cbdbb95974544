"""A range of m as one library: a few kernels over one packed copy, split where measurements say."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from time import monotonic

from gemm_tuner.derive import is_believed
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.micro_kernel import MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, SweepEnd, Trial
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import InvalidSetting, TrialFailed
from gemm_tuner.select.measured_range import MeasuredRows, at_rows, measured_at
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import predict_cycles
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.attempt import Attempts
from gemm_tuner.tuning.earlier import earlier_trials
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.host import start_host_while_compiling
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.race import find_race
from gemm_tuner.tuning.ranges.boundaries import (
    Piece,
    Shape,
    Speeds,
    can_be_split,
    candidate_of,
    first_rows,
    rows_between,
    shapes_near,
    split,
)
from gemm_tuner.tuning.ranges.range_search import Format, RangeSearch
from gemm_tuner.tuning.sampling import how_to_compare, how_to_confirm
from gemm_tuner.tuning.settings import SweepSettings

# As many m between those that are measured first, over these.
_MORE_ROWS = 0.5
# A kernel of another m is timed at an m unless the model expects so many times the least time.
_SLOWER_AT_MOST = 1.5
_CONFIRMED_AT_MOST = 3
_COMPARING_S = 5.0  # until one comparison has shown how long it takes


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRange:
    """The library for a range of m: the trial that confirmed it, and each m that was measured."""

    trial: Trial
    measured: tuple[MeasuredRows, ...]


def split_range(
    problem: Problem,
    *,
    context: ExecutionContext,
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    on_progress: Callable[[Progress], None],
    is_stopped: Callable[[], bool],
) -> SplitRange:
    """Tune a range of m as one library of a few kernels that read one packed copy.

    Some m are tuned each for itself. A few kernels of each are then tried in the formats of packed
    weights that promise most, and those m that lose much by the best of these are searched in it.
    The kernels of all are timed at each m; where they take turns, more m are measured, of which the
    best format may be another. What comes of it is proved and confirmed as a kernel of the range,
    and timed at each m beside the kernel for that m alone. `settings.budget_s` is the time for each
    m. All of it is stored: a second run goes on.

    Raises:
        InvalidSetting: m is no range.
        Stopped: it `is_stopped`.
        TrialFailed: the library is wrong, or was not timed.
        GemmTunerError: as in a sweep.
    """
    if not can_be_split(problem.m):
        raise InvalidSetting(
            f"m = {problem.m.text} is no range that could be split; write it as 1..512."
        )
    one = _Splitting(
        problem=problem,
        context=context,
        cpu=cpu,
        repository=repository,
        settings=settings,
        on_progress=on_progress,
        is_stopped=is_stopped,
    )
    return one.run()


@dataclass(slots=True, kw_only=True)
class _Splitting:
    """One range on its way: the m that were measured, each with its best kernel alone."""

    problem: Problem
    context: ExecutionContext
    cpu: Cpu
    repository: Repository
    settings: SweepSettings
    on_progress: Callable[[Progress], None]
    is_stopped: Callable[[], bool]
    search: RangeSearch = field(init=False)
    comparing_s: float = _COMPARING_S
    # The format in which kernels were compared last, and the speeds at each m, of the same rounds.
    compared_in: Format | None = None
    compared: dict[int, Mapping[Candidate, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.search = RangeSearch(
            problem=self.problem,
            context=self.context,
            cpu=self.cpu,
            repository=self.repository,
            settings=self.settings,
            on_progress=self._show,
            is_stopped=self.is_stopped,
        )

    def run(self) -> SplitRange:
        rows: Sequence[int] = first_rows(self.problem.m)
        most = ceil((1 + _MORE_ROWS) * len(rows))
        search = self.search
        search.tune_alone(rows)
        pieces: tuple[Piece, ...] = ()
        speeds: Speeds = {}
        while rows:
            search.explore_formats(rows)
            # What is measured between two m may speak for another format than these did.
            wanted, like = search.best_format()
            search.search_format(like)
            speeds = self._compare(wanted, pieces)
            pieces = split(speeds)
            between = [one for one in rows_between(pieces, speeds) if one not in self.alone]
            rows = between[: max(0, most - len(self.alone))]
            search.tune_alone(rows)
        search.renew_alone()
        trial = self._confirm(candidate_of(pieces, self.problem.m, speeds))
        return SplitRange(
            trial=trial,
            measured=tuple(
                self._measure(m, trial, left=len(self.alone) - place)
                for place, m in enumerate(sorted(self.alone))
            ),
        )

    @property
    def alone(self) -> dict[int, Candidate]:
        """Return the best kernel of each measured m."""
        return self.search.alone

    def _tell(self, stage: str, *, left: int) -> None:
        """Say what is compared, of so many comparisons that take as long as the last one did."""
        self.on_progress(
            Progress(
                stage=stage,
                done=len(self.alone),
                total=max(len(self.alone), len(first_rows(self.problem.m))),
                best_ratio=None,
                remaining_s=left * self.comparing_s,
            )
        )

    def _show(self, step: Progress) -> None:
        """Show a step of a search, after which each m is compared twice, and the library proved."""
        count = max(len(self.alone), len(first_rows(self.problem.m)))
        comparing_s = (2 * count + 1) * self.comparing_s
        self.on_progress(replace(step, remaining_s=step.remaining_s + comparing_s))

    def _compare(self, wanted: Format, before: Sequence[Piece]) -> Speeds:
        """Time kernels in a format at each m, and return their speeds there.

        At first, they are the best of all m. Once the range was split in the format, `before`, they
        are those that may be best there.
        """
        timed = {m: self.search.in_format(m, wanted) for m in self.alone}
        best = {
            m: Shape.of(max(speeds, key=lambda one: speeds[one]), m)
            for m, speeds in sorted(timed.items())
            if speeds
        }
        if not best:
            raise TrialFailed(
                f"no kernel of {self.problem.text!r} was timed in a format for all m; give more "
                "--budget."
            )
        if wanted != self.compared_in:
            self.compared_in, before = wanted, ()
            self.compared.clear()
        of_pieces = [piece.shape for piece in before]
        speeds: dict[int, Mapping[Shape, float]] = {}
        for place, m in enumerate(self.alone):
            shapes = shapes_near(m, best, before) if before else (*dict.fromkeys(best.values()),)
            known = self.compared.get(m) or timed[m]
            certain = {shape.at(m) for shape in shapes if shape in of_pieces}
            # Each m is compared once more, at last.
            left = 2 * len(self.alone) - place
            found = self._time_at(m, [shape.at(m) for shape in shapes], certain, known, left=left)
            self.compared[m] = found
            every = dict.fromkeys([*best.values(), *of_pieces])
            speeds[m] = {shape: found[one] for shape in every if (one := shape.at(m)) in found}
        return {m: of_shapes for m, of_shapes in speeds.items() if of_shapes}

    def _time_at(
        self,
        m: int,
        pool: Sequence[Candidate],
        certain: Collection[Candidate],
        known: Mapping[Candidate, float],
        *,
        left: int,
    ) -> Mapping[Candidate, float]:
        """Return the speeds of some kernels at an m, and of the best that was known.

        They are timed together unless each was. Those that the model expects to be slow are left
        out, unless they are `certain`.
        """
        problem = at_rows(self.problem, m)
        cycles = {
            one: predict_cycles(problem, one, family_named(one.micro_kernel.family), self.cpu)
            for one in pool
        }
        most = _SLOWER_AT_MOST * min(cycles.values())
        near = [one for one in pool if cycles[one] <= most or one in certain]
        if known.keys() >= set(near):
            return known
        best = [max(known, key=lambda one: known[one])] if known else []
        together = [*dict.fromkeys([*near, *best])]
        self._tell(f"m = {m}, comparing kernels", left=left)
        with self._attempts(problem, together) as attempts:
            self._time(attempts, together)
        assert self.compared_in is not None
        found = self.search.in_format(m, self.compared_in)
        return {one: found[one] for one in together if one in found}

    def _confirm(self, candidate: Candidate) -> Trial:
        """Return the trial that confirmed a candidate for the whole range, made if there is none.

        Where other work disturbs it, it is timed again.
        """
        trials = earlier_trials(self.repository, self.problem, self.cpu, self.settings.toolchain)
        confirmed = [
            trial
            for trial in trials
            if trial.candidate == candidate
            and trial.context == self.context
            and trial.stage is Stage.CONFIRM
            and trial.generator == generator_version()
            and is_believed(trial)
        ]
        if confirmed and not self.settings.again:
            return confirmed[-1]
        self._tell("proving and confirming the library", left=len(self.alone) + 1)
        with self._attempts(self.problem, [candidate]) as attempts:
            for _attempt in range(_CONFIRMED_AT_MOST):
                self.search.check()
                (trial,) = self._time(attempts, [candidate], confirms=True)
                if is_believed(trial):
                    break
            self._mark_ended(attempts.host.baselines(self.context.regime).text)
        return trial

    def _mark_ended(self, baseline: str) -> None:
        """Let an ordinary sweep of the range with no larger budget answer with the library."""
        self.repository.mark_ended(
            self.problem,
            self.cpu.exact_key,
            self.context,
            toolchain=self.settings.toolchain.text,
            generator=generator_version(),
            end=SweepEnd(baseline=baseline, is_exhausted=False, budget_s=self.settings.budget_s),
        )

    def _measure(self, m: int, trial: Trial, *, left: int) -> MeasuredRows:
        """Return the library at an m beside the kernel for it alone, timed unless it was."""
        problem = at_rows(self.problem, m)
        assert trial.artifact is not None
        sha256 = trial.artifact.sha256

        def stored() -> MeasuredRows | None:
            return measured_at(self.repository, sha256, problem, cpu=self.cpu, context=self.context)

        found = None if self.settings.again else stored()
        is_current = (
            found is not None and found.alone.candidate == self.alone[m] and not found.is_doubted
        )
        if not is_current:
            self.search.check()
            self._tell(f"m = {m}, comparing the library", left=left)
            with self._attempts(problem, [self.alone[m]]) as attempts:
                # What a loss is told of has the same rounds, however slow it was in the first few.
                self._time(attempts, [self.alone[m], trial.candidate], keeps_all=True)
            found = stored()
        if found is None:
            raise TrialFailed(
                f"the best kernel for {problem.text!r} was not timed beside the library."
            )
        return found

    @contextmanager
    def _attempts(self, problem: Problem, first: Sequence[Candidate]) -> Iterator[Attempts]:
        """Yield what tries candidates for a problem; several kernels are rendered for the range."""
        settings = self.settings

        def render(asked: Problem, candidate: Candidate, family: MicroKernelFamily) -> Source:
            return settings.render(self.problem if candidate.below else asked, candidate, family)

        space = replace(self.search.space(1), problem=problem)
        begin_s = monotonic()
        earlier = earlier_trials(self.repository, problem, self.cpu, settings.toolchain)
        race = find_race(earlier, settings, context=self.context)
        with start_host_while_compiling(
            space,
            first,
            replace(settings, render=render),
            [race],
            self.is_stopped,
            for_problem=problem,
        ) as host:
            attempts = Attempts(
                problem=problem,
                cpu=self.cpu,
                host=host,
                repository=self.repository,
                toolchain=settings.toolchain,
                render=render,
            )
            attempts.recall(earlier)
            yield attempts
        self.comparing_s = monotonic() - begin_s

    def _time(
        self,
        attempts: Attempts,
        candidates: Sequence[Candidate],
        *,
        confirms: bool = False,
        keeps_all: bool = False,
    ) -> list[Trial]:
        """Prove candidates, time those that are right in the same rounds, and return their trials.

        Raises:
            TrialFailed: one that has several kernels is not among them.
        """
        proven = attempts.prove(candidates, self.context)
        self.search.check()
        call_s = attempts.host.baselines(self.context.regime).call_s
        threads = self.context.threads
        sampling = how_to_confirm(call_s, threads) if confirms else how_to_compare(call_s)
        trials = attempts.time(
            proven,
            self.context,
            stage=sampling.stage,
            pairs=sampling.affordable_pairs(
                len(proven), call_s=call_s, budget_s=self.settings.budget_s
            ),
            sample_ns=sampling.sample_ns,
            processes=sampling.processes,
            keeps_all=keeps_all,
        )
        for one in candidates:
            if one.below and one not in [trial.candidate for trial in trials]:
                failed = attempts.trial_of(one)
                why = failed.detail or failed.outcome.value if failed else "it was not timed"
                raise TrialFailed(f"the library for {self.problem.text!r} failed: {why}.")
        return trials
