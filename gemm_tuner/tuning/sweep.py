"""A sweep: search the candidates of one problem, in each context, within a budget."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.bench.plain import plain_problem
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.codegen.environment import generator_version
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, SweepEnd, Trial
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.select.derive import (
    EQUALLY_FAST,
    derive_verdict,
    standing_trials,
    sturdiest_of_fastest,
)
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import NOMINAL_CLOCK_HZ, predict_cycles
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.attempt import Attempts, Render
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.care import (
    CONFIRM,
    CONFIRMED,
    FINAL,
    FINALISTS,
    RACE,
    Care,
    confirming_s,
)
from gemm_tuner.tuning.earlier import (
    earlier_trials,
    finalists_of_other_regimes,
    relevant_trials,
    winner_of_one_thread,
)
from gemm_tuner.tuning.search import FAVOURITES, Chosen, LocalSearch, Strategy

RIVALS_FROM_OTHER_REGIME = 8
_SHARE_TO_CONFIRM = 0.6  # of the budget in a context

_EXPECTED_BASELINES = {"auto": "onednn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """How to sweep: the time for one problem, all contexts together, and with what."""

    toolchain: Toolchain
    budget_s: float = 30.0
    seed: int = 0
    baseline: str = "auto"
    render: Render = field(default=render)

    def __post_init__(self) -> None:
        """Check the budget."""
        if not 0 < self.budget_s < inf:
            raise InvalidSetting(
                f"budget {self.budget_s} s cannot be used; give a positive time such as 30s."
            )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The verdict for one context and the trials it rests on; counts are of candidates.

    `note` says in words why the baseline is not the one that was to be expected, empty if it is.
    """

    verdict: Verdict
    finalists: tuple[Trial, ...]
    tried: int
    failed: int
    resumed: bool
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a sweep would do: candidates in the space, and the longest time in seconds."""

    candidates: int
    seconds: float


def estimate(
    problem: Problem, contexts: Sequence[ExecutionContext], cpu: Cpu, settings: SweepSettings
) -> Estimate:
    """Return the size of the search space and the longest time of a sweep, without running it.

    The end of a sweep, where finalists are confirmed, may exceed the budget of a slow problem.
    """
    space = Space(problem=problem, cpu=cpu, threads=contexts[0].threads)
    fastest = min(
        predict_cycles(problem, one, family_named(one.micro_kernel.family), cpu)
        for one in space.defaults()
    )
    call_s = fastest / NOMINAL_CLOCK_HZ
    longest_s = confirming_s(call_s, settings.budget_s, confirmed=CONFIRMED)
    seconds = settings.budget_s + len(contexts) * longest_s
    return Estimate(candidates=space.size(), seconds=seconds)


def sweep(
    problem: Problem,
    *,
    contexts: Sequence[ExecutionContext],
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    on_progress: Callable[[Progress], None],
    is_stopped: Callable[[], bool],
    like: Candidate | None = None,
    chosen: Sequence[Candidate] = (),
) -> tuple[SweepResult, ...]:
    """Tune one problem and return a result for each context, in order.

    What was proved or timed is in the repository before anything else is tried. A sweep whose
    search was exhausted, or that had as large a budget, is not run again beside the same baseline;
    any other goes on with what it knows. With `like`, only what reads weights packed as by it is
    searched and returned, and a kernel that was confirmed is the end of it. Of `chosen` candidates,
    if there are any, the best is found without a search.

    Raises:
        NoKernelFamily: no family covers the problem on this CPU.
        NotEnoughMemory: the operands do not fit.
        BaselineMissing: the chosen baseline is not available.
    """
    baseline = _EXPECTED_BASELINES.get(settings.baseline, settings.baseline)
    space = Space(problem=problem, cpu=cpu, threads=contexts[0].threads, like=like)
    found = {
        context: _finished(space, context, repository, settings, baseline=baseline)
        for context in contexts
    }
    if any(result is None for result in found.values()):
        budget = Budget(seconds=settings.budget_s)
        with start_host(problem, space, settings) as host:
            attempts = Attempts(
                problem=problem,
                cpu=cpu,
                host=host,
                repository=repository,
                toolchain=settings.toolchain,
                render=settings.render,
            )
            earlier = earlier_trials(repository, problem, cpu, settings.toolchain)
            for trial in earlier:
                attempts.recall(trial)
            rivals: list[Candidate] = []
            for context in [context for context in contexts if found[context] is None]:
                found[context] = _finished(
                    space, context, repository, settings, baseline=host.baseline_text
                )
            unfinished = [context for context in contexts if found[context] is None]
            for position, context in enumerate(unfinished):
                share = budget.share(len(unfinished) - position)
                in_regime = replace(space, regime=context.regime)
                alone = winner_of_one_thread(earlier, space, context)
                one = _ContextSweep(
                    attempts,
                    in_regime,
                    context,
                    budget,
                    share,
                    settings,
                    on_progress,
                    is_stopped,
                    _alone=alone,
                )
                cuts = space.cuts_of(alone) if alone else []
                known = earlier_trials(repository, problem, cpu, settings.toolchain)
                elsewhere = finalists_of_other_regimes(known, context)
                # The winner of one thread, cut for all threads and as it is.
                certain = [*cuts[:1], *cuts[-1:], *(one for one in elsewhere if one in space)]
                strategy = (
                    Chosen(chosen) if chosen else LocalSearch(in_regime, seeds=cuts, rivals=rivals)
                )
                found[context] = one.run(
                    strategy, certain=[] if chosen else certain, is_search=not chosen
                )
                rivals = one.ranked()[:RIVALS_FROM_OTHER_REGIME]
    return tuple(result for result in found.values() if result is not None)


def start_host(
    problem: Problem, space: Space, settings: SweepSettings, *, provers: int = 1
) -> TrialHost:
    """Return a server for the trials of a problem, beside the baseline of `settings`.

    Up to `provers` builds can be verified at the same time.
    """
    plain = plain_problem(problem)
    candidates = replace(space, problem=plain, like=None).defaults()
    scalar = min(
        (one for one in candidates if one.micro_kernel.family.startswith("scalar")),
        key=lambda one: predict_cycles(
            plain, one, family_named(one.micro_kernel.family), space.cpu
        ),
    )
    family = family_named(scalar.micro_kernel.family)
    return TrialHost(
        problem,
        threads=space.threads,
        baseline=settings.baseline,
        toolchain=settings.toolchain,
        seed=settings.seed,
        scalar_build=compile_kernel(
            render(plain, scalar, family), isa=family.isa, toolchain=settings.toolchain
        ),
        provers=provers,
    )


def _finished(
    space: Space,
    context: ExecutionContext,
    repository: Repository,
    settings: SweepSettings,
    *,
    baseline: str,
) -> SweepResult | None:
    """Return the result of an earlier sweep beside `baseline` that came to its end, if any.

    The baseline is a name, which stands for each version, or a name and a version.
    """
    problem, cpu = space.problem, space.cpu
    ends = repository.sweep_ends(
        problem,
        cpu.exact_key,
        context,
        toolchain=settings.toolchain.text,
        generator=generator_version(),
    )
    for end in ends:
        is_as_long = end.is_exhausted or end.budget_s >= settings.budget_s
        if not (is_as_long and end.baseline.startswith(baseline)):
            continue
        earlier = earlier_trials(repository, problem, cpu, settings.toolchain)
        trials = relevant_trials(earlier, space, context, end.baseline)
        if space.like is None or standing_trials(trials):
            return _result(problem, cpu, context, trials, complete=end.is_exhausted, resumed=True)
    return None


def _result(
    problem: Problem,
    cpu: Cpu,
    context: ExecutionContext,
    trials: Sequence[Trial],
    *,
    complete: bool,
    resumed: bool,
    note: str = "",
) -> SweepResult:
    outcomes = {trial.candidate: trial.outcome for trial in trials}
    finals = {
        trial.candidate: trial
        for trial in trials
        if trial.stage in {Stage.FINAL, Stage.CONFIRM}
        and outcomes[trial.candidate] is Outcome.CORRECT
    }
    return SweepResult(
        verdict=derive_verdict(
            trials, problem=problem, cpu_key=cpu.exact_key, context=context, complete=complete
        ),
        finalists=tuple(finals.values()),
        tried=len(outcomes),
        failed=sum(outcome is not Outcome.CORRECT for outcome in outcomes.values()),
        resumed=resumed,
        note=note,
    )


@dataclass(slots=True)
class _ContextSweep:
    """The search in one context, from the first race to the confirmed winner."""

    _attempts: Attempts
    _space: Space
    _context: ExecutionContext
    _whole_budget: Budget
    _budget: Budget
    _settings: SweepSettings
    _on_progress: Callable[[Progress], None]
    _is_stopped: Callable[[], bool]
    _speeds: dict[Candidate, float] = field(default_factory=dict)
    _call_ns: dict[Candidate, float] = field(default_factory=dict)
    _trials: list[Trial] = field(default_factory=list)
    _slowest_call_s: float = 0.0
    _alone: Candidate | None = None  # the winner of one thread: it is a finalist

    def run(
        self, strategy: Strategy, *, certain: Sequence[Candidate], is_search: bool
    ) -> SweepResult:
        """Try until it is over, the budget is spent or the user stops it; then confirm.

        The `certain` candidates are tried first, whatever the budget. What is tried is the end of
        the sweep only if it `is_search`.
        """
        resumed = self._recall()
        self._race(certain, is_certain=True)
        is_exhausted = self._search(strategy) and is_search
        if self._speeds and not self._is_stopped():
            self._confirm()
        problem, cpu = self._space.problem, self._space.cpu
        if is_search and not self._is_stopped() and self._space.like is None:
            self._attempts.repository.mark_ended(
                problem,
                cpu.exact_key,
                self._context,
                toolchain=self._attempts.toolchain.text,
                generator=generator_version(),
                end=SweepEnd(
                    baseline=self._attempts.host.baseline_text,
                    is_exhausted=is_exhausted,
                    budget_s=self._settings.budget_s,
                ),
            )
        return _result(
            problem,
            cpu,
            self._context,
            [*self._trials, *self._attempts.failures],
            complete=is_exhausted,
            resumed=resumed,
            note=self._attempts.host.baseline_note,
        )

    def ranked(self) -> list[Candidate]:
        """Return the candidates that were timed, fastest first."""
        return sorted(self._speeds, key=lambda one: (-self._speeds[one], one.text))

    def _recall(self) -> bool:
        """Take over what earlier, stopped sweeps have found; return whether there was anything."""
        attempts = self._attempts
        earlier = earlier_trials(
            attempts.repository, self._space.problem, self._space.cpu, attempts.toolchain
        )
        self._trials = relevant_trials(
            earlier, self._space, self._context, attempts.host.baseline_text
        )
        for trial in self._trials:
            if trial.measurement is not None:
                self._speeds[trial.candidate] = trial.measurement.ratio.median
                self._call_ns[trial.candidate] = trial.measurement.candidate.median_ns
            elif trial.outcome is not Outcome.CORRECT:
                self._speeds.pop(trial.candidate, None)
        return any(trial.context == self._context for trial in self._trials)

    def _search(self, strategy: Strategy) -> bool:
        """Race batch after batch; return whether the search came to its end by itself."""
        while batch := strategy.next_batch(self._speeds):
            if self._is_stopped() or (self._speeds and not self._has_time_for(1)):
                return False
            is_whole = self._race(batch)
            self._report("searching", strategy.pending)
            if not is_whole:
                return False
        return True

    def _race(self, batch: Sequence[Candidate], *, is_certain: bool = False) -> bool:
        """Time what is new of a batch; return whether there was time for all of it."""
        new = [one for one in dict.fromkeys(batch) if one not in self._speeds]
        if not new:
            return True
        proven: list[Candidate] = []
        for candidate in self._attempts.prove(new, self._context):
            if self._is_stopped():
                return False
            is_first = not (self._speeds or proven)
            if not (is_certain or is_first or self._has_time_for(len(proven) + 1)):
                self._time(proven, RACE)
                return False
            proven.append(candidate)
        self._time(proven, RACE)
        return True

    @property
    def _call_s(self) -> float:
        """Return the time of the slowest call that was timed, or else of one of the baseline."""
        return self._slowest_call_s or self._attempts.host.baseline_call_s

    def _has_time_for(self, candidates: int) -> bool:
        """Return whether some candidates may still be raced, and the best be confirmed.

        Where calls are slow, what is over the share for confirming comes on top of the budget.
        """
        call_s, budget_s = self._call_s, self._settings.budget_s
        finalists = min(FINALISTS, len(self._speeds) + candidates)
        reserved_s = min(
            confirming_s(call_s, budget_s, finalists=finalists),
            _SHARE_TO_CONFIRM * self._budget.seconds,
        )
        race_s = RACE.duration_s(candidates, call_s=call_s, budget_s=budget_s)
        return self._budget.remaining_s > race_s + reserved_s

    def _confirm(self) -> None:
        """Time the best few carefully, then the best of them once more, for its own sake.

        The next is confirmed too where the speed of one that was confirmed does not hold beside
        those of the others.
        """
        self._report("confirming", 0)
        proven = list(self._attempts.prove(self._finalists(), self._context))
        if self._is_stopped():
            return
        speeds = self._time(proven, FINAL) if len(proven) > 1 else dict.fromkeys(proven, 1.0)
        waiting = self._without_useless_threads(speeds)
        confirmed = 0.0
        for _attempt in range(CONFIRMED):
            is_held = confirmed * EQUALLY_FAST >= max(waiting.values(), default=0.0)
            if is_held or self._is_stopped():
                return
            candidate = sturdiest_of_fastest(waiting, self._space.problem)
            del waiting[candidate]
            speeds = self._time([candidate], CONFIRM)
            confirmed = max(confirmed, speeds.get(candidate, 0.0))

    def _finalists(self) -> list[Candidate]:
        """Return the best few, and of several threads the best that needs one."""
        best = self.ranked()[:FINALISTS]
        if self._context.threads == 1:
            return best
        alone = self._alone if self._alone in self._speeds else self._fastest_alone(self._speeds)
        return list(dict.fromkeys([*best, alone] if alone else best))

    def _without_useless_threads(self, speeds: dict[Candidate, float]) -> dict[Candidate, float]:
        """Leave out what takes longer with several threads than the fastest takes with one.

        Speeds over a baseline may not show it: where its threads get into each other's way, its
        own time differs from one run to the next.
        """
        alone = self._fastest_alone(speeds)
        if alone is None:
            return speeds
        return {
            one: speed
            for one, speed in speeds.items()
            if one.parts == 1 or self._call_ns[one] < self._call_ns[alone]
        }

    def _fastest_alone(self, candidates: Iterable[Candidate]) -> Candidate | None:
        return min(
            (one for one in candidates if one.parts == 1),
            key=lambda one: (self._call_ns[one], one.text),
            default=None,
        )

    def _time(self, candidates: Sequence[Candidate], care: Care) -> dict[Candidate, float]:
        """Return the speeds over that of the baseline of those that did not fail."""
        for candidate in candidates:
            self._speeds.pop(candidate, None)
        if not candidates:
            return {}
        trials = self._attempts.time(
            candidates,
            self._context,
            stage=care.stage,
            pairs=care.affordable_pairs(
                len(candidates), call_s=self._call_s, budget_s=self._settings.budget_s
            ),
            sample_ns=care.sample_ns,
        )
        self._trials += trials
        for trial in trials:
            if trial.measurement is not None:
                self._learn(trial.candidate, trial.measurement)
        return {one: self._speeds[one] for one in candidates if one in self._speeds}

    def _learn(self, candidate: Candidate, measurement: Measurement) -> None:
        self._speeds[candidate] = measurement.ratio.median
        call_ns = self._call_ns[candidate] = measurement.candidate.median_ns
        slowest_ns = max(call_ns, measurement.baseline_timing.median_ns)
        self._slowest_call_s = max(self._slowest_call_s, slowest_ns / 1e9)

    def _report(self, stage: str, pending: int) -> None:
        tried = len(self._speeds) + len(self._attempts.failures)
        self._on_progress(
            Progress(
                stage=f"{self._context.regime.value}, {stage}",
                done=tried,
                total=max(tried + pending, FAVOURITES),
                best_ratio=max(self._speeds.values(), default=None),
                remaining_s=self._whole_budget.remaining_s,
            )
        )
