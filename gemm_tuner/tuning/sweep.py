"""A sweep: search the candidates of one problem, in each context, within a budget."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from gemm_tuner.bench.baselines.choose import Race
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import SweepEnd, Trial
from gemm_tuner.machine.cpus import check_cpus
from gemm_tuner.select.recorded import Records, recorded_winners, records_at_hand
from gemm_tuner.space.candidates import Space
from gemm_tuner.store.repository import Repository
from gemm_tuner.strategies.table import make_strategy
from gemm_tuner.tuning.attempt import Attempts, build_candidate
from gemm_tuner.tuning.budget import Budget, share_of_first
from gemm_tuner.tuning.context_sweep import ContextSweep
from gemm_tuner.tuning.earlier import (
    Prior,
    earlier_trials,
    find_prior,
    first_tried,
    former_trials,
)
from gemm_tuner.tuning.finished import recall_finished
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.host import start_host_while_compiling, start_slice_host
from gemm_tuner.tuning.patience import Patience
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.race import expected_baseline, find_race
from gemm_tuner.tuning.rebuild import rebuild_lost
from gemm_tuner.tuning.result import SweepResult
from gemm_tuner.tuning.sampling import FINALISTS
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.slow import slice_of

CANDIDATES_FROM_OTHER_REGIME = 8


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
    seeds: Sequence[Candidate] = (),
    chosen: Sequence[Candidate] = (),
) -> tuple[SweepResult, ...]:
    """Tune one problem and return a result for each context, in order.

    What was proved or timed is in the repository before anything else is tried. A sweep whose
    search was exhausted, or that had as large a budget, is not run again beside the same baseline,
    unless its answer is not settled; any other goes on with what it knows. A finalist whose binary
    was lost is built again, and the results say so. With `like`, only what reads weights packed as
    by it is searched and returned, and that search has an end of its own. A search begins with the
    `seeds`. Of `chosen` candidates, if there are any, the best is found without one.

    Raises:
        InvalidProblem: the problem multiplies nothing.
        InvalidSetting: it has no weights that could be cold.
        NoKernelFamily: no family covers the problem on this CPU.
        NotEnoughMemory: the operands do not fit.
        NotEnoughCpus: there are more threads than this process can run at the same time.
        BaselineMissing: the chosen baseline is not available.
        PreparationStopped: it `is_stopped` before it could try anything, where that is to end it.
    """
    problem.check_work(*(context.regime for context in contexts))
    check_cpus(contexts[0].threads)
    rebuilt = _rebuild_lost(problem, cpu, repository, settings)
    space = Space(problem=problem, cpu=cpu, threads=contexts[0].threads, like=like)
    earlier = earlier_trials(repository, problem, cpu, settings.toolchain)
    races = {context: find_race(earlier, settings, context=context) for context in contexts}
    expected = {context: expected_baseline(settings, race) for context, race in races.items()}
    found = recall_finished(space, expected, repository, settings)
    if len(found) < len(contexts):
        budget = Budget(seconds=settings.budget_s)
        former = former_trials(repository, problem, cpu)
        records = Records(found=()) if chosen else records_at_hand(repository, problem, cpu)
        in_first = replace(space, regime=contexts[0].regime)
        prior = _find_prior(in_first, contexts[0], earlier, former, records, seeds=seeds)
        first = chosen or first_tried(in_first, prior)
        part = None if chosen else slice_of(space)
        to_race = [race for context, race in races.items() if context not in found]
        with start_host_while_compiling(
            space, first, settings, to_race, is_stopped, for_problem=part or problem
        ) as host:
            attempts = Attempts(
                problem=problem,
                cpu=cpu,
                host=host,
                repository=repository,
                toolchain=settings.toolchain,
                render=settings.render,
            )
            attempts.recall(earlier)
            unfinished = [context for context in contexts if context not in found]
            chosen_here = {one: host.baselines(one.regime).text for one in unfinished}
            found |= recall_finished(space, chosen_here, repository, settings)
            unfinished = [context for context in unfinished if context not in found]
            with _open_slices(
                part if unfinished else None,
                space,
                attempts,
                settings=settings,
                races=[races[context] for context in unfinished],
                is_stopped=is_stopped,
            ) as slices:
                found |= _search_contexts(
                    unfinished,
                    space=space,
                    attempts=attempts,
                    slices=slices,
                    budget=budget,
                    former=former,
                    records=records,
                    seeds=seeds,
                    chosen=chosen,
                    on_progress=on_progress,
                    is_stopped=is_stopped,
                    settings=settings,
                )
    results = [found[context] for context in contexts]
    return tuple(
        replace(result, note=" ".join(filter(None, (rebuilt, result.note)))) for result in results
    )


def _rebuild_lost(
    problem: Problem, cpu: Cpu, repository: Repository, settings: SweepSettings
) -> str:
    """Build again what the store has lost of the finalists of earlier sweeps; say so."""
    return rebuild_lost(
        earlier_trials(repository, problem, cpu, settings.toolchain),
        repository,
        lambda candidate: build_candidate(
            problem, candidate, toolchain=settings.toolchain, render=settings.render
        ),
    )


def _find_prior(
    space: Space,
    context: ExecutionContext,
    earlier: Sequence[Trial],
    former: Sequence[Trial],
    records: Records,
    *,
    seeds: Sequence[Candidate],
) -> Prior:
    """Return what a search has from earlier ones; `seeds`, and what is recorded to win, lead it."""
    prior = find_prior(space, context, earlier, former)
    winners = recorded_winners(records, space, context).candidates
    return replace(prior, seeds=(*seeds, *winners, *prior.seeds))


@contextmanager
def _open_slices(
    part: Problem | None,
    space: Space,
    attempts: Attempts,
    *,
    settings: SweepSettings,
    races: Sequence[Race],
    is_stopped: Callable[[], bool],
) -> Iterator[Attempts | None]:
    """Yield what tries candidates on a part of the problem, if there is one that can be timed."""
    host = None
    if part is not None:
        of_part = replace(space, problem=part)
        host = start_slice_host(of_part, attempts.host, settings, races, is_stopped)
    if part is None or host is None:
        yield None
        return
    with host:
        slices = Attempts(
            problem=part,
            cpu=attempts.cpu,
            host=host,
            repository=attempts.repository,
            toolchain=attempts.toolchain,
            render=attempts.render,
        )
        slices.recall(earlier_trials(attempts.repository, part, attempts.cpu, attempts.toolchain))
        yield slices


def _search_contexts(
    contexts: Sequence[ExecutionContext],
    *,
    space: Space,
    attempts: Attempts,
    slices: Attempts | None,
    budget: Budget,
    former: Sequence[Trial],
    records: Records,
    seeds: Sequence[Candidate],
    chosen: Sequence[Candidate],
    on_progress: Callable[[Progress], None],
    is_stopped: Callable[[], bool],
    settings: SweepSettings,
) -> dict[ExecutionContext, SweepResult]:
    """Search one context after the other, each with its share of the remaining budget.

    The best of one are tried early in the next. With `slices`, races are on a part of the problem.
    """
    found: dict[ExecutionContext, SweepResult] = {}
    elsewhere: list[Candidate] = []
    certain = chosen if settings.tries_all_chosen else ()
    for position, context in enumerate(contexts):
        in_regime = replace(space, regime=context.regime)
        known = earlier_trials(attempts.repository, space.problem, space.cpu, attempts.toolchain)
        prior = _find_prior(in_regime, context, known, former, records, seeds=seeds)
        left = len(contexts) - position
        one = ContextSweep(
            attempts=attempts,
            earlier=known,
            patience=Patience(budget_s=budget.seconds, threads=context.threads),
            on_end=partial(_mark_ended, attempts, in_regime, context),
            space=in_regime,
            context=context,
            whole_budget=budget,
            budget=share_of_first(
                budget,
                left,
                space.problem,
                baseline_call_s=attempts.host.baselines(context.regime).call_s,
            ),
            on_progress=on_progress,
            is_stopped=is_stopped,
            alone=prior.alone,
            again=settings.again,
            is_final=settings.tries_all_chosen and len(chosen) <= FINALISTS,
            slices=slices,
            earlier_slices=earlier_trials(
                attempts.repository, slices.problem, space.cpu, attempts.toolchain
            )
            if slices
            else (),
        )
        result = one.run(
            make_strategy(
                in_regime, settings.plan, seeds=prior.seeds, elsewhere=elsewhere, chosen=chosen
            ),
            certain=certain if chosen else prior.certain,
            is_search=settings.plan.is_default and not chosen,
        )
        found[context] = replace(result, raced_on=slices.problem.text if slices else "")
        elsewhere = one.ranked()[:CANDIDATES_FROM_OTHER_REGIME]
    return found


def _mark_ended(attempts: Attempts, space: Space, context: ExecutionContext, end: SweepEnd) -> None:
    """Keep that the search in a context came to its end: it is not run again."""
    attempts.repository.mark_ended(
        attempts.problem,
        attempts.cpu.exact_key,
        context,
        toolchain=attempts.toolchain.text,
        generator=generator_version(),
        end=end,
        packed_format=space.packed_format,
    )
