"""Kernels for a CPU that is not here: the model chooses, and the choice is proved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemm_tuner.bench.emulator import can_prove
from gemm_tuner.codegen.environment import generator_version
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu, IsaFeature, isa_text
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.errors import IsaNotUsable
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.attempt import Attempts
from gemm_tuner.tuning.budget import Budget
from gemm_tuner.tuning.sweep import Progress, SweepSettings, start_host

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
    out. Each is in the repository, with its binary, before the next begins; what was proved before
    is not proved again, unless it hung. One at least is tried, and others while
    `settings.budget_s` lasts.

    Raises:
        NoKernelFamily: no family covers the problem on this CPU.
        IsaNotUsable: none of the candidates can be proved on this machine.
        NotEnoughMemory: the operands do not fit.
    """
    space = Space(problem=problem, cpu=cpu, threads=context.threads)
    candidates = _provable(shortlist(space, SHORTLIST), cpu)
    budget = Budget(seconds=settings.budget_s)
    known = {
        trial.candidate: trial
        for trial in repository.trials(
            problem=problem, cpu_key=cpu.exact_key, generator=generator_version()
        )
        if trial.stage is Stage.PREDICTED
        and trial.outcome is not Outcome.HUNG
        and trial.context == context
        and trial.toolchain == settings.toolchain.text
    }
    new = [one for one in candidates if one not in known]
    found = {one: known[one] for one in candidates if one in known}
    if new:
        with start_host(problem, space, settings) as host:
            attempts = Attempts(
                problem=problem,
                cpu=cpu,
                host=host,
                repository=repository,
                toolchain=settings.toolchain,
                stage=Stage.PREDICTED,
                render=settings.render,
            )
            for candidate in new:
                if is_stopped() or (found and budget.remaining_s <= 0):
                    break
                list(attempts.prove([candidate], context))
                if trial := attempts.trial_of(candidate):
                    found[candidate] = trial
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
