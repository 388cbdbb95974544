"""A sweep: search the candidates of one problem, in each context, within a budget."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.select.derive import standing_trials
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.model import NOMINAL_CLOCK_HZ, predict_cycles
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.attempt import Attempts, Render, build_candidate
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.context_sweep import ContextSweep, Progress
from gemm_tuner.tuning.earlier import (
    Prior,
    earlier_trials,
    find_prior,
    former_trials,
    relevant_trials,
)
from gemm_tuner.tuning.rebuild import rebuild_lost
from gemm_tuner.tuning.result import SweepResult, make_result
from gemm_tuner.tuning.sampling import CONFIRMED, confirming_s, most_finalists
from gemm_tuner.tuning.search import BATCH, Chosen, LocalSearch

CANDIDATES_FROM_OTHER_REGIME = 8

# Of a call; memory that one core reads at this rate is slow for a server.
_LITTLE_TO_READ = 0.03
_SLOW_MEMORY_BYTES_PER_S = 8e9
_SHARE_OF_SAME_REGIME = 0.5

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
class Estimate:
    """What a sweep would do: candidates in the space, and the longest time in seconds."""

    candidates: int
    seconds: float


def estimate(
    problem: Problem, contexts: Sequence[ExecutionContext], cpu: Cpu, settings: SweepSettings
) -> Estimate:
    """Return the size of the search space and the longest time of a sweep, without running it.

    The end of a sweep, where finalists are confirmed, may exceed the budget of a slow problem. On a
    machine that does other work, parts of it may be timed twice.
    """
    space = Space(problem=problem, cpu=cpu, threads=contexts[0].threads)
    fastest = min(
        predict_cycles(problem, one, family_named(one.micro_kernel.family), cpu)
        for one in space.defaults()
    )
    call_s = fastest / NOMINAL_CLOCK_HZ
    longest_s = confirming_s(
        call_s,
        settings.budget_s,
        finalists=most_finalists(call_s=call_s, budget_s=settings.budget_s) + (space.threads > 1),
        confirmed=CONFIRMED,
    )
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
    any other goes on with what it knows. A finalist whose binary was lost is built again, and the
    results say so. With `like`, only what reads weights packed as by it is searched and returned,
    and a kernel that was confirmed is the end of it. Of `chosen` candidates, if there are any, the
    best is found without a search.

    Raises:
        InvalidProblem: the problem multiplies nothing.
        NoKernelFamily: no family covers the problem on this CPU.
        NotEnoughMemory: the operands do not fit.
        BaselineMissing: the chosen baseline is not available.
    """
    problem.check_work()
    baseline = _EXPECTED_BASELINES.get(settings.baseline, settings.baseline)
    rebuilt = rebuild_lost(
        earlier_trials(repository, problem, cpu, settings.toolchain),
        repository,
        lambda candidate: build_candidate(
            problem, candidate, toolchain=settings.toolchain, render=settings.render
        ),
    )
    space = Space(problem=problem, cpu=cpu, threads=contexts[0].threads, like=like)
    found = {
        context: _finished(space, context, repository, settings, baseline=baseline)
        for context in contexts
    }
    if any(result is None for result in found.values()):
        budget = Budget(seconds=settings.budget_s)
        earlier = earlier_trials(repository, problem, cpu, settings.toolchain)
        former = former_trials(repository, problem, cpu)
        in_first = replace(space, regime=contexts[0].regime)
        prior = find_prior(in_first, contexts[0], earlier, former)
        first = chosen or _tried_first(in_first, prior)
        with _start_host_and_builds(space, first[:BATCH], settings) as host:
            attempts = Attempts(
                problem=problem,
                cpu=cpu,
                host=host,
                repository=repository,
                toolchain=settings.toolchain,
                render=settings.render,
            )
            for trial in earlier:
                attempts.recall(trial)
            elsewhere: list[Candidate] = []
            for context in [context for context in contexts if found[context] is None]:
                found[context] = _finished(
                    space, context, repository, settings, baseline=host.baseline_text
                )
            unfinished = [context for context in contexts if found[context] is None]
            for position, context in enumerate(unfinished):
                left = len(unfinished) - position
                share = budget.share(1 + (left - 1) * _share_of_others(problem, host))
                in_regime = replace(space, regime=context.regime)
                known = earlier_trials(repository, problem, cpu, settings.toolchain)
                prior = find_prior(in_regime, context, known, former)
                one = ContextSweep(
                    attempts=attempts,
                    space=in_regime,
                    context=context,
                    whole_budget=budget,
                    budget=share,
                    on_progress=on_progress,
                    is_stopped=is_stopped,
                    alone=prior.alone,
                )
                strategy = (
                    Chosen(chosen)
                    if chosen
                    else LocalSearch(in_regime, seeds=prior.seeds, elsewhere=elsewhere)
                )
                certain = () if chosen else prior.certain
                found[context] = one.run(strategy, certain=certain, is_search=not chosen)
                elsewhere = one.ranked()[:CANDIDATES_FROM_OTHER_REGIME]
    results = (result for result in found.values() if result is not None)
    return tuple(
        replace(result, note=" ".join(filter(None, (rebuilt, result.note)))) for result in results
    )


def _tried_first(space: Space, prior: Prior) -> list[Candidate]:
    """Return what a search tries first: what it has from earlier ones, then favourites."""
    favourites = shortlist(space, BATCH)
    return list(dict.fromkeys([*prior.certain, *prior.seeds, *favourites]))


def _start_host_and_builds(
    space: Space, first: Sequence[Candidate], settings: SweepSettings
) -> TrialHost:
    """Return a host; while it prepares, what is tried first is compiled, into the cache.

    When it is ready, no more of that begins: what the sweep needs at once goes first.
    """
    cpus = usable_cpus()
    executor = ThreadPoolExecutor(max_workers=cpus)
    try:
        for candidate in first:
            executor.submit(
                build_candidate,
                space.problem,
                candidate,
                toolchain=settings.toolchain,
                render=settings.render,
            )
        return start_host(space.problem, space, settings, provers=min(BATCH, cpus))
    finally:
        executor.shutdown(cancel_futures=True)


def _share_of_others(problem: Problem, host: TrialHost) -> float:
    """Return how much of a context's budget each one after it gets.

    Where the arithmetic takes far longer than it takes to read the weights from memory, regimes
    differ little, and the best of one need only be timed in the others.
    """
    is_alike = problem.w_bytes < _LITTLE_TO_READ * _SLOW_MEMORY_BYTES_PER_S * host.baseline_call_s
    return _SHARE_OF_SAME_REGIME if is_alike else 1.0


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
            return make_result(
                problem, cpu, context, trials, complete=end.is_exhausted, resumed=True
            )
    return None
