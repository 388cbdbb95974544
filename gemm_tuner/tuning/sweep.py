"""A sweep: search the candidates of one problem, in each context, within a budget."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from gemm_tuner.bench.baselines.choose import Race
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import SweepEnd, Trial
from gemm_tuner.machine.cpus import check_cpus
from gemm_tuner.machine.measuring_lock import measuring
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
from gemm_tuner.tuning.progress import Progress, waiting
from gemm_tuner.tuning.race import expected_baseline, find_race
from gemm_tuner.tuning.rebuild import rebuild_lost
from gemm_tuner.tuning.result import SweepResult
from gemm_tuner.tuning.sampling import FINALISTS
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.slices import slice_of

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
        PreparationStopped: it `is_stopped` before it could try anything, where that is to end it,
            or while another measures.
    """
    problem.check_work(*(context.regime for context in contexts))
    check_cpus(contexts[0].threads)
    asked = _Sweep(
        contexts=contexts,
        space=Space(problem=problem, cpu=cpu, threads=contexts[0].threads, like=like),
        repository=repository,
        settings=settings,
        on_progress=on_progress,
        is_stopped=is_stopped,
        seeds=seeds,
        chosen=chosen,
    )
    rebuilt = asked.rebuild_lost()
    found = asked.run()
    return tuple(
        replace(found[context], note=" ".join(filter(None, (rebuilt, found[context].note))))
        for context in contexts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hints:
    """What is worth trying first: trials of another generator, and what is recorded to win."""

    former: Sequence[Trial]
    records: Records


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """What `sweep` was asked for; the `space` is of the problem on the CPU."""

    contexts: Sequence[ExecutionContext]
    space: Space
    repository: Repository
    settings: SweepSettings
    on_progress: Callable[[Progress], None]
    is_stopped: Callable[[], bool]
    seeds: Sequence[Candidate]
    chosen: Sequence[Candidate]

    @property
    def problem(self) -> Problem:
        return self.space.problem

    def rebuild_lost(self) -> str:
        """Build again what the store has lost of the finalists of earlier sweeps; say so."""
        return rebuild_lost(
            self.earlier(self.problem),
            self.repository,
            lambda candidate: build_candidate(
                self.problem,
                candidate,
                toolchain=self.settings.toolchain,
                render=self.settings.render,
            ),
        )

    def run(self) -> dict[ExecutionContext, SweepResult]:
        """Return the results of all contexts, of which earlier sweeps may have finished some.

        For others, another thread or process of this user that measures is waited for.

        Raises:
            PreparationStopped: it `is_stopped` meanwhile.
        """
        found = self._finished()
        if len(found) == len(self.contexts):
            return found
        with measuring(self.is_stopped, lambda text: self.on_progress(waiting(text))):
            found = self._finished()  # that other may have found it
            earlier = self.earlier(self.problem)
            left = {
                context: race
                for context, race in self._races(earlier).items()
                if context not in found
            }
            return found | self._search(left, earlier) if left else found

    def _finished(self) -> dict[ExecutionContext, SweepResult]:
        """Return the results of the contexts that earlier sweeps finished."""
        races = self._races(self.earlier(self.problem))
        return self._recall(
            {context: expected_baseline(self.settings, race) for context, race in races.items()}
        )

    def _races(self, earlier: Sequence[Trial]) -> dict[ExecutionContext, Race]:
        return {one: find_race(earlier, self.settings, context=one) for one in self.contexts}

    def _search(
        self, races: Mapping[ExecutionContext, Race], earlier: Sequence[Trial]
    ) -> dict[ExecutionContext, SweepResult]:
        """Return the results of the contexts of these races, once it is known who won them."""
        budget = Budget(seconds=self.settings.budget_s)
        hints = self._find_hints()
        part = None if self.chosen else slice_of(self.space)
        with start_host_while_compiling(
            self.space,
            self._first_tried(earlier, hints),
            self.settings,
            list(races.values()),
            self.is_stopped,
            for_problem=part or self.problem,
        ) as host:
            attempts = self._attempts(self.problem, host, earlier)
            found = self._recall({one: host.baselines(one.regime).text for one in races})
            left = {context: race for context, race in races.items() if context not in found}
            with self._open_slices(part if left else None, attempts, left) as slices:
                search = _Search(
                    asked=self, attempts=attempts, slices=slices, budget=budget, hints=hints
                )
                return found | search.run(list(left))

    def earlier(self, problem: Problem) -> list[Trial]:
        """Return the trials of a problem that still stand."""
        return earlier_trials(self.repository, problem, self.space.cpu, self.settings.toolchain)

    def find_prior(
        self, context: ExecutionContext, earlier: Sequence[Trial], hints: _Hints
    ) -> Prior:
        """Return what a search has from earlier ones; seeds, and what is recorded, lead it."""
        space = self.space_in(context)
        prior = find_prior(space, context, earlier, hints.former)
        winners = recorded_winners(hints.records, space, context).candidates
        return replace(prior, seeds=(*self.seeds, *winners, *prior.seeds))

    def space_in(self, context: ExecutionContext) -> Space:
        """Return the candidates in the regime of a context."""
        return replace(self.space, regime=context.regime)

    def _recall(
        self, baselines: Mapping[ExecutionContext, str | None]
    ) -> dict[ExecutionContext, SweepResult]:
        return recall_finished(self.space, baselines, self.repository, self.settings)

    def _find_hints(self) -> _Hints:
        known = self.repository, self.problem, self.space.cpu
        return _Hints(
            former=former_trials(*known),
            records=Records(found=()) if self.chosen else records_at_hand(*known),
        )

    def _first_tried(self, earlier: Sequence[Trial], hints: _Hints) -> Sequence[Candidate]:
        first = self.contexts[0]
        return self.chosen or first_tried(
            self.space_in(first), self.find_prior(first, earlier, hints)
        )

    def _attempts(self, problem: Problem, host: TrialHost, earlier: Sequence[Trial]) -> Attempts:
        attempts = Attempts(
            problem=problem,
            cpu=self.space.cpu,
            host=host,
            repository=self.repository,
            toolchain=self.settings.toolchain,
            render=self.settings.render,
        )
        attempts.recall(earlier)
        return attempts

    @contextmanager
    def _open_slices(
        self, part: Problem | None, attempts: Attempts, races: Mapping[ExecutionContext, Race]
    ) -> Iterator[Attempts | None]:
        """Yield what tries candidates on a part of the problem, if there is one to be timed."""
        host = None
        if part is not None:
            host = start_slice_host(
                replace(self.space, problem=part),
                attempts.host,
                self.settings,
                list(races.values()),
                self.is_stopped,
            )
        if part is None or host is None:
            yield None
            return
        with host:
            yield self._attempts(part, host, self.earlier(part))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """The search of a sweep in its contexts; with `slices`, races are on a part of the problem."""

    asked: _Sweep
    attempts: Attempts
    slices: Attempts | None
    budget: Budget
    hints: _Hints

    def run(self, contexts: Sequence[ExecutionContext]) -> dict[ExecutionContext, SweepResult]:
        """Search one context after the other, each with its share of the remaining budget.

        The best of one are tried early in the next.
        """
        found: dict[ExecutionContext, SweepResult] = {}
        elsewhere: list[Candidate] = []
        settings, chosen = self.asked.settings, self.asked.chosen
        certain = chosen if settings.tries_all_chosen else ()
        for position, context in enumerate(contexts):
            known = self.asked.earlier(self.asked.problem)
            prior = self.asked.find_prior(context, known, self.hints)
            share = share_of_first(
                self.budget,
                len(contexts) - position,
                self.asked.problem,
                baseline_call_s=self.attempts.host.baselines(context.regime).call_s,
            )
            one = self._in_context(context, share, known, alone=prior.alone)
            strategy = make_strategy(
                one.space, settings.plan, seeds=prior.seeds, elsewhere=elsewhere, chosen=chosen
            )
            result = one.run(
                strategy,
                certain=certain if chosen else prior.certain,
                is_search=settings.plan.is_default and not chosen,
            )
            raced_on = self.slices.problem.text if self.slices else ""
            found[context] = replace(result, raced_on=raced_on)
            elsewhere = one.ranked()[:CANDIDATES_FROM_OTHER_REGIME]
        return found

    def _in_context(
        self,
        context: ExecutionContext,
        share: Budget,
        known: Sequence[Trial],
        *,
        alone: Candidate | None,
    ) -> ContextSweep:
        asked, settings = self.asked, self.asked.settings
        return ContextSweep(
            attempts=self.attempts,
            earlier=known,
            patience=Patience(budget_s=self.budget.seconds, threads=context.threads),
            on_end=partial(self._mark_ended, context),
            space=asked.space_in(context),
            context=context,
            whole_budget=self.budget,
            budget=share,
            on_progress=asked.on_progress,
            is_stopped=asked.is_stopped,
            alone=alone,
            again=settings.again,
            since=settings.since,
            is_final=settings.tries_all_chosen and len(asked.chosen) <= FINALISTS,
            slices=self.slices,
            earlier_slices=asked.earlier(self.slices.problem) if self.slices else (),
        )

    def _mark_ended(self, context: ExecutionContext, end: SweepEnd) -> None:
        """Keep that the search in a context came to its end: it is not run again."""
        asked = self.asked
        asked.repository.mark_ended(
            asked.problem,
            asked.space.cpu.exact_key,
            context,
            toolchain=asked.settings.toolchain.text,
            generator=generator_version(),
            end=end,
            packed_format=asked.space.packed_format,
        )
