"""Kernels for a CPU that is not here: the model chooses, and the choice is proved."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gemm_tuner.bench.emulator import can_prove
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu, IsaFeature, isa_text
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.errors import IsaNotUsable
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.scaling.ranking import ranked_on_server
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.attempt import Attempts, build_candidate
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.host import start_host
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.standing import stands

SHORTLIST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """What was proved for a problem on a CPU, the model's first choice first, and what failed."""

    proven: tuple[Trial, ...]
    failed: tuple[Trial, ...]


def predict(
    problem: Problem,
    *,
    context: ExecutionContext,
    cpu: Cpu,
    repository: Repository,
    settings: SweepSettings,
    on_progress: Callable[[Progress], None],
    is_stopped: Callable[[], bool],
) -> Shortlist:
    """Build and prove the candidates that the model ranks first on `cpu`, without timing any.

    Features that this machine lacks are emulated; what can neither run nor be emulated here is left
    out. As many are proved at the same time as there are cores, and each is in the repository, with
    its binary, before `on_progress` hears of it; what was proved before is not proved again, unless
    it hung, in whichever regime: nothing is timed. One at least is tried, and others while
    `settings.budget_s` lasts.

    Raises:
        InvalidSetting: cold weights are asked for, and w is an activation.
        NoKernelFamily: no family covers the problem on this CPU.
        IsaNotUsable: none of the candidates can be proved on this machine.
        NotEnoughMemory: the operands do not fit.
    """
    problem.check_work(context.regime)
    space = Space(problem=problem, cpu=cpu, threads=context.threads)
    order = ranked_on_server(space.defaults(), problem, cpu, space.threads)
    candidates = _provable(order[:SHORTLIST], cpu)
    budget = Budget(seconds=settings.budget_s)
    known = {
        trial.candidate: trial
        for trial in repository.trials(
            problem=problem, cpu_key=cpu.exact_key, generator=generator_version()
        )
        if trial.stage is Stage.PREDICTED
        and trial.outcome is not Outcome.HUNG
        and trial.context.threads == context.threads
        and stands(trial, settings.toolchain)
    }
    found = {one: known[one] for one in candidates if one in known}
    new = [one for one in candidates if one not in known]
    if new and not (is_stopped() or (found and budget.is_spent())):
        for trial in _prove_together(
            new,
            context=context,
            space=space,
            repository=repository,
            settings=settings,
            is_over=lambda: is_stopped() or budget.is_spent(),
        ):
            found[trial.candidate] = trial
            on_progress(
                Progress(
                    stage="proving",
                    done=len(found),
                    total=len(candidates),
                    best_ratio=None,
                    remaining_s=budget.remaining_s,
                )
            )
    trials = [found[one] for one in candidates if one in found]
    return Shortlist(
        proven=tuple(one for one in trials if one.outcome is Outcome.CORRECT),
        failed=tuple(one for one in trials if one.outcome is not Outcome.CORRECT),
    )


def _prove_together(
    candidates: Sequence[Candidate],
    *,
    context: ExecutionContext,
    space: Space,
    repository: Repository,
    settings: SweepSettings,
    is_over: Callable[[], bool],
) -> Iterator[Trial]:
    """Yield the trials of candidates as they end: nothing is timed, so every usable core proves.

    Candidates are compiled while the inputs and exact results are made.
    """
    problem, workers = space.problem, usable_cpus()
    with ThreadPoolExecutor(max_workers=workers) as executor:
        builds = {
            one: executor.submit(
                build_candidate,
                problem,
                one,
                toolchain=settings.toolchain,
                render=settings.render,
            )
            for one in candidates
        }
        # The host is closed first, whatever happens: then no thread waits for it.
        try:
            provers = min(workers, len(candidates))
            with start_host(problem, space, settings, provers=provers) as host:
                attempts = Attempts(
                    problem=problem,
                    cpu=space.cpu,
                    host=host,
                    repository=repository,
                    toolchain=settings.toolchain,
                    stage=Stage.PREDICTED,
                )
                yield from attempts.prove_together(
                    builds, context, executor=executor, is_over=is_over
                )
        finally:
            for build in builds.values():
                build.cancel()


def _provable(candidates: Sequence[Candidate], cpu: Cpu) -> list[Candidate]:
    """Return the candidates for `cpu` that this machine can run, with what it can emulate."""
    here = detect_cpu()
    needed = {one: family_named(one.micro_kernel.family).isa for one in candidates}
    found = [one for one in candidates if can_prove(needed[one], cpu=here)]
    if not found:
        missing = frozenset[IsaFeature]().union(*needed.values()) - here.isa
        raise IsaNotUsable(
            f"no kernel for {cpu.brand} can be proved here: {isa_text(missing)} can neither be run "
            "nor emulated; choose them on a CPU that has more of these features."
        )
    return found
