"""The results of earlier sweeps of a problem on a CPU, and those that count for the next."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.derive import derive_verdict, standing_trials
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository
from gemm_tuner.strategies.strategy import BATCH
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.standing import stands

_FROM_OTHER_REGIMES = 2
_FROM_OTHER_BASELINES = 2


def earlier_trials(
    repository: Repository,
    problem: Problem,
    cpu: Cpu,
    toolchain: Toolchain,
) -> list[Trial]:
    """Return the trials on the CPU that still stand, in any context, of whatever generator.

    Proofs that were made elsewhere for such a CPU, or by emulation, are not among them.
    """
    return [
        trial
        for trial in repository.trials(problem=problem, cpu_key=cpu.exact_key)
        if trial.stage is not Stage.PREDICTED and not trial.emulated and stands(trial, toolchain)
    ]


def former_trials(repository: Repository, problem: Problem, cpu: Cpu) -> list[Trial]:
    """Return the trials of the newest other generator on the CPU, from here or imported.

    Its kernels may be others, but what won with it is worth trying first. Of records from
    elsewhere, and of those that nobody attests, those of this generator count, too: as hints.
    """
    present = generator_version()
    trials = repository.trials(problem=problem, cpu_key=cpu.exact_key, origin=None)
    of_here = set(repository.trials(problem=problem, cpu_key=cpu.exact_key))
    others = [
        trial
        for trial in trials
        if (trial.generator != present or trial not in of_here) and not trial.emulated
    ]
    return [trial for trial in others if trial.generator == others[-1].generator]


def relevant_trials(
    trials: Sequence[Trial], space: Space, context: ExecutionContext, baseline: str
) -> list[Trial]:
    """Return the failures, the proofs in a context, and its timings beside a baseline.

    A verdict rests on confirmations by one generator. What another one timed tells how fast a
    kernel is, but as in a race: if that is among the fastest, it is confirmed again.
    """
    return [
        trial if trial.generator == generator_version() else replace(trial, stage=Stage.RACE)
        for trial in trials
        if trial.candidate in space
        and (
            trial.outcome is not Outcome.CORRECT
            or (
                trial.context == context
                and trial.had_its_threads
                and (trial.measurement is None or trial.measurement.baseline == baseline)
            )
        )
    ]


def best_beside_others(
    trials: Sequence[Trial], space: Space, context: ExecutionContext, baseline: str
) -> list[Candidate]:
    """Return the kernels that took least in a context when they were confirmed beside others.

    A verdict rests on the newest baseline alone. So what was found beside another one has to be
    timed beside this one, or a slower kernel would take its place.
    """
    fastest: dict[Candidate, float] = {}
    for trial in standing_trials(trials):
        timed = trial.measurement
        if timed is None or trial.context != context or timed.baseline == baseline:
            continue
        if trial.candidate in space:
            call_ns = timed.candidate.median_ns
            fastest[trial.candidate] = min(call_ns, fastest.get(trial.candidate, call_ns))
    return sorted(fastest, key=lambda one: (fastest[one], one.text))[:_FROM_OTHER_BASELINES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What a search in a context has from earlier ones.

    The winner of one thread, `alone`, is there if several threads are asked for. The `certain`
    candidates are tried whatever the budget; the `seeds` lead the first batch.
    """

    alone: Candidate | None
    certain: tuple[Candidate, ...]
    seeds: tuple[Candidate, ...]


def find_prior(
    space: Space, context: ExecutionContext, earlier: Sequence[Trial], former: Sequence[Trial]
) -> Prior:
    """Return the results of earlier trials for a search, and those of the generator before."""
    alone = _winner_of_one_thread(earlier, space, context) or _winner_of_one_thread(
        former, space, context
    )
    cuts = space.cuts_of(alone) if alone else []
    elsewhere = _finalists_of_other_regimes(earlier, context)
    # What won before leads the first batch; alone, it would take the time of others.
    before = _winner(former, space, context)
    return Prior(
        alone=alone,
        # The winner of one thread, cut for all threads and as it is.
        certain=(*cuts[:1], *cuts[-1:], *(one for one in elsewhere if one in space)),
        seeds=(*([before] if before else []), *cuts),
    )


def first_tried(space: Space, prior: Prior) -> list[Candidate]:
    """Return the first candidates of a search: those from earlier ones, then favourites."""
    return list(dict.fromkeys([*prior.certain, *prior.seeds, *shortlist(space, BATCH)]))


def _winner(trials: Sequence[Trial], space: Space, context: ExecutionContext) -> Candidate | None:
    """Return the candidate for which trials of one generator speak, if it is of this space."""
    found = derive_verdict(
        trials, problem=space.problem, cpu_key=space.cpu.exact_key, context=context, complete=False
    ).candidate
    is_of_space = (
        found is not None and found.micro_kernel.family in CATALOG and space.cuts_of(found)
    )
    return found if is_of_space else None


def _winner_of_one_thread(
    earlier: Sequence[Trial], space: Space, context: ExecutionContext
) -> Candidate | None:
    """Return the winner of one thread in the same regime, where several are asked for.

    So several threads are compared with one, and a call too small for them stays with one.
    """
    if context.threads == 1:
        return None
    return _winner(earlier, space, replace(context, threads=1))


def _finalists_of_other_regimes(
    trials: Sequence[Trial], context: ExecutionContext
) -> list[Candidate]:
    """Return the best two finalists of the other regimes on as many threads, the best first."""
    speeds = {
        trial.candidate: trial.measurement.comparable_speed
        for trial in trials
        if trial.stage in {Stage.FINAL, Stage.CONFIRM}
        and trial.measurement is not None
        and trial.context == replace(context, regime=trial.context.regime)
        and trial.context != context
    }
    return sorted(speeds, key=lambda one: (-speeds[one], one.text))[:_FROM_OTHER_REGIMES]
