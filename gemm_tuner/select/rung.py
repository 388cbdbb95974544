"""What one rung of the lookup ladder answers, and the verdict it draws from trials."""

from collections.abc import Sequence
from dataclasses import dataclass

from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.select.derive import derive_verdict
from gemm_tuner.store.repository import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A verdict, or none, and the sentence that explains it."""

    verdict: Verdict | None
    reason: str


def servable_verdict(
    repository: Repository, trials: Sequence[Trial], *, problem: Problem, cpu: Cpu, basis: Basis
) -> Verdict | None:
    """Return the verdict for `problem` on `cpu` from the newest generator that gives one.

    `trials` are of one problem, CPU and context. Only kernels that `cpu` can run count, and only
    those whose binaries are in the store, unless all that they show is that the baseline is faster.
    """
    runnable = [
        trial
        for trial in trials
        if trial.measurement and trial.artifact and trial.artifact.required_isa <= cpu.isa
    ]
    held = repository.held_artifacts({t.artifact.sha256 for t in runnable if t.artifact})
    for generator in dict.fromkeys(trial.generator for trial in reversed(runnable)):
        of_generator = [trial for trial in runnable if trial.generator == generator]
        in_store = [t for t in of_generator if t.artifact and t.artifact.sha256 in held]
        verdict = _derive(repository, in_store or of_generator, problem, cpu, basis)
        if verdict.artifact is None or verdict.artifact.sha256 in held:
            return verdict
    return None


def _derive(
    repository: Repository, trials: Sequence[Trial], problem: Problem, cpu: Cpu, basis: Basis
) -> Verdict:
    last = trials[-1]
    end = repository.sweep_end(
        last.problem,
        last.cpu.exact_key,
        last.context,
        toolchain=last.toolchain,
        generator=last.generator,
    )
    return derive_verdict(
        trials,
        problem=problem,
        cpu_key=cpu.exact_key,
        context=last.context,
        complete=end is not None and end.is_exhausted,
        basis=basis,
    )
