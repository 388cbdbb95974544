"""The answer of one step of the lookup, and the verdict that it derives from trials."""

from collections.abc import Sequence
from dataclasses import dataclass

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.select.derive import derive_verdict, is_believed, standing_trials
from gemm_tuner.store.repository import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A verdict, or none, and the sentence that explains it.

    `confirmed` are the trials of all kernels that could be served in the place of the verdict's.
    """

    verdict: Verdict | None
    reason: str
    confirmed: tuple[Trial, ...] = ()


def servable(
    repository: Repository,
    trials: Sequence[Trial],
    *,
    problem: Problem,
    cpu: Cpu,
    context: ExecutionContext,
    basis: Basis,
) -> tuple[Verdict | None, tuple[Trial, ...]]:
    """Return the verdict for `problem` on `cpu` from the newest generator that gives one.

    With it come the confirmed trials, of this generator, of kernels that could be served. A verdict
    whose measurement gives reason to doubt is returned where there is no other.

    `trials` are of one problem and CPU, in every stage and context: a failure in any of them
    speaks against a kernel. Trials beside different baselines are not compared: the newest count.
    Only kernels that `cpu` can run are named, and only those whose binaries are in the store.
    """
    runnable = [
        trial
        for trial in standing_trials(trials)
        if trial.context == context and trial.artifact and trial.artifact.required_isa <= cpu.isa
    ]
    held = repository.held_artifacts({t.artifact.sha256 for t in runnable if t.artifact})
    doubted: Verdict | None = None
    for group in dict.fromkeys(_group(trial) for trial in reversed(runnable)):
        of_group = [trial for trial in runnable if _group(trial) == group]
        in_store = [t for t in of_group if t.artifact and t.artifact.sha256 in held]
        verdict = _derive(repository, in_store or of_group, problem, cpu, basis)
        if verdict.doubt is not None:
            doubted = doubted or verdict
        elif verdict.artifact is None or verdict.artifact.sha256 in held:
            return verdict, tuple(trial for trial in in_store if is_believed(trial))
    return doubted, ()


def _group(trial: Trial) -> tuple[str, str]:
    """Return the key that comparable trials share: the generator and the baseline."""
    return trial.generator, trial.measurement.baseline if trial.measurement else ""


def _derive(
    repository: Repository, trials: Sequence[Trial], problem: Problem, cpu: Cpu, basis: Basis
) -> Verdict:
    last = trials[-1]
    _generator, baseline = _group(last)
    ends = repository.sweep_ends(
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
        complete=any(end.is_exhausted and end.baseline == baseline for end in ends),
        basis=basis,
    )
