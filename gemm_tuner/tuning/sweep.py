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
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, SweepEnd, Trial
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.select.derive import (
    EQUALLY_FAST,
    derive_verdict,
    simplest_of_fastest,
    standing_trials,
)
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import NOMINAL_CLOCK_HZ, predict_cycles
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.attempt import Attempts, Render
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.search import FAVOURITES, Chosen, LocalSearch, Strategy

SEEDS_FROM_OTHER_REGIME = 8
FINALISTS = 4
CONFIRMED = 3
_REACH = 0.8  # of the speed of the fastest in the races: slower ones do not win the final


@dataclass(frozen=True, slots=True, kw_only=True)
class _Care:
    """How carefully to time: samples of each callee, and how long one takes at least.

    Where calls are slow there are fewer pairs, down to `fewest_pairs`, so that timing takes at most
    `share` of the budget.
    """

    stage: Stage
    pairs: int
    fewest_pairs: int
    sample_ns: int
    share: float


_RACE = _Care(stage=Stage.RACE, pairs=5, fewest_pairs=3, sample_ns=400_000, share=0.01)
_FINAL = _Care(stage=Stage.FINAL, pairs=15, fewest_pairs=9, sample_ns=2_000_000, share=0.03)
_CONFIRM = _Care(stage=Stage.CONFIRM, pairs=21, fewest_pairs=11, sample_ns=2_000_000, share=0.05)
_CONFIRMING = (*(_FINAL,) * FINALISTS, *(_CONFIRM,) * CONFIRMED)

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
    confirming_s = sum(_duration_s(care, call_s, settings.budget_s) for care in _CONFIRMING)
    seconds = settings.budget_s + len(contexts) * confirming_s
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

    Every trial is in the repository before the next begins. A sweep whose search was exhausted, or
    that had as large a budget, is not run again beside the same baseline; any other goes on with
    what it knows. With `like`, only what reads weights packed as by it is searched and returned,
    and a kernel that was confirmed is the end of it. Of `chosen` candidates, if there are any, the
    best is found without a search.

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
            seeds: Sequence[Candidate] = ()
            for context in [context for context in contexts if found[context] is None]:
                found[context] = _finished(
                    space, context, repository, settings, baseline=host.baseline_text
                )
            unfinished = [context for context in contexts if found[context] is None]
            for position, context in enumerate(unfinished):
                share = budget.share(len(unfinished) - position)
                in_regime = replace(space, regime=context.regime)
                one = _ContextSweep(
                    attempts, in_regime, context, budget, share, settings, on_progress, is_stopped
                )
                strategy = (
                    Chosen(chosen)
                    if chosen
                    else LocalSearch(
                        in_regime,
                        seeds=[*_cuts_of_one_thread(earlier, space, context), *seeds],
                    )
                )
                found[context] = one.run(strategy, is_search=not chosen)
                seeds = one.ranked()[:SEEDS_FROM_OTHER_REGIME]
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
        trials = _relevant(earlier, space, context, end.baseline)
        if space.like is None or standing_trials(trials):
            return _result(problem, cpu, context, trials, complete=end.is_exhausted, resumed=True)
    return None


def _cuts_of_one_thread(
    earlier: Sequence[Trial], space: Space, context: ExecutionContext
) -> list[Candidate]:
    """Return the winner of one thread in the same regime, if known, cut for several and as it is.

    So several threads are compared with one, and a call too small for them stays with one.
    """
    if context.threads == 1:
        return []
    alone = replace(context, threads=1)
    verdict = derive_verdict(
        earlier, problem=space.problem, cpu_key=space.cpu.exact_key, context=alone, complete=False
    )
    return space.cuts_of(verdict.candidate) if verdict.candidate else []


def _relevant(
    trials: Sequence[Trial], space: Space, context: ExecutionContext, baseline: str
) -> list[Trial]:
    """Return the failures, the proofs in a context, and its timings beside a baseline."""
    return [
        trial
        for trial in trials
        if trial.candidate in space
        and (
            trial.outcome is not Outcome.CORRECT
            or (
                trial.context == context
                and (trial.measurement is None or trial.measurement.baseline == baseline)
            )
        )
    ]


def earlier_trials(
    repository: Repository,
    problem: Problem,
    cpu: Cpu,
    toolchain: Toolchain,
) -> list[Trial]:
    """Return what these templates and this compiler gave before on the CPU, in any context.

    Proofs that were made elsewhere for such a CPU, or by emulation, are not among them.
    """
    trials = repository.trials(
        problem=problem, cpu_key=cpu.exact_key, generator=generator_version()
    )
    return [
        trial
        for trial in trials
        if trial.toolchain == toolchain.text
        and trial.stage is not Stage.PREDICTED
        and not trial.emulated
    ]


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

    def run(self, strategy: Strategy, *, is_search: bool) -> SweepResult:
        """Try until it is over, the budget is spent or the user stops it; then confirm.

        What is tried is the end of the sweep only if it `is_search`.
        """
        resumed = self._recall()
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
        self._trials = _relevant(earlier, self._space, self._context, attempts.host.baseline_text)
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
            is_spent = self._budget.remaining_s <= self._confirming_s()
            if self._is_stopped() or (is_spent and self._speeds):
                return False
            is_whole = self._race([one for one in batch if one not in self._speeds])
            self._report("searching", strategy.pending)
            if not is_whole:
                return False
        return True

    def _race(self, batch: list[Candidate]) -> bool:
        """Time a batch; return whether there was time for all of it."""
        for candidate in self._attempts.prove(batch, self._context):
            if self._is_stopped() or (self._speeds and self._budget.remaining_s <= 0):
                return False
            self._time(candidate, _RACE)
        return True

    def _confirm(self) -> None:
        """Time the best few carefully, then the best of them once more, for its own sake.

        The next is confirmed too where the speed of one that was confirmed does not hold beside
        those of the others.
        """
        self._report("confirming", 0)
        waiting: dict[Candidate, float] = {}
        for candidate in self._attempts.prove(self._finalists(), self._context):
            if self._is_stopped():
                return
            if speed := self._time(candidate, _FINAL):
                waiting[candidate] = speed
        waiting = self._without_useless_threads(waiting)
        confirmed = 0.0
        for _attempt in range(CONFIRMED):
            is_held = confirmed * EQUALLY_FAST >= max(waiting.values(), default=0.0)
            if is_held or self._is_stopped():
                return
            candidate = simplest_of_fastest(waiting)
            del waiting[candidate]
            confirmed = max(confirmed, self._time(candidate, _CONFIRM))

    def _finalists(self) -> list[Candidate]:
        """Return the best few, and the fastest that needs one thread, if it is not far behind."""
        best = self.ranked()[:FINALISTS]
        alone = self._fastest_alone(self._speeds)
        if self._context.threads == 1 or alone is None:
            return best
        in_reach_ns = min(self._call_ns[one] for one in best) / _REACH
        return list(dict.fromkeys([*best, alone] if self._call_ns[alone] <= in_reach_ns else best))

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

    def _time(self, candidate: Candidate, care: _Care) -> float:
        """Return the speed over that of the baseline, 0 for a candidate that failed."""
        self._speeds.pop(candidate, None)
        trial = self._attempts.time(
            candidate,
            self._context,
            stage=care.stage,
            pairs=_affordable_pairs(care, self._slowest_call_s, self._settings.budget_s),
            sample_ns=care.sample_ns,
        )
        if trial is None or trial.measurement is None:
            return 0.0
        self._trials.append(trial)
        measurement = trial.measurement
        speed = self._speeds[candidate] = measurement.ratio.median
        call_ns = self._call_ns[candidate] = measurement.candidate.median_ns
        slowest_ns = max(call_ns, measurement.baseline_timing.median_ns)
        self._slowest_call_s = max(self._slowest_call_s, slowest_ns / 1e9)
        return speed

    def _confirming_s(self) -> float:
        """Return how long confirming would take, in seconds."""
        call_s, budget_s = self._slowest_call_s, self._settings.budget_s
        return sum(_duration_s(care, call_s, budget_s) for care in _CONFIRMING)

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


def _affordable_pairs(care: _Care, call_s: float, budget_s: float) -> int:
    """Return how many samples of a candidate and of the baseline may be taken."""
    return max(
        care.fewest_pairs, min(care.pairs, int(care.share * budget_s / _pair_s(care, call_s)))
    )


def _duration_s(care: _Care, call_s: float, budget_s: float) -> float:
    """Return how long such a timing takes, in seconds."""
    return _pair_s(care, call_s) * _affordable_pairs(care, call_s, budget_s)


def _pair_s(care: _Care, call_s: float) -> float:
    return 2 * max(call_s, care.sample_ns / 1e9)
