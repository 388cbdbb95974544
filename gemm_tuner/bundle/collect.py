"""Which kernels a bundle holds, and for which problems there is none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.reason import reason_for
from gemm_tuner.domain.units import context_text
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.select.choose import choose
from gemm_tuner.store.repository import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledKernel:
    """A kernel with the verdict that names it; `description` is what its library says of itself."""

    verdict: Verdict
    candidate: Candidate
    artifact: Artifact
    binary: bytes
    source_text: str
    description: str
    packed_format: str

    @property
    def problem(self) -> Problem:
        """Return the problem that it computes."""
        return self.verdict.problem

    @property
    def layer_name(self) -> str:
        """Return the text of its problem, with `*` for the rows."""
        return self.problem.layer_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A problem without a kernel, and why it has none."""

    problem: Problem
    reason: str

    @property
    def layer_name(self) -> str:
        """Return the text of the problem, with `*` for the rows."""
        return self.problem.layer_text


def collect(
    repository: Repository,
    problems: Sequence[Problem],
    *,
    cpu: Cpu,
    context: ExecutionContext,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[tuple[BundledKernel, ...], tuple[Missing, ...]]:
    """Return the kernels that a store serves for problems on this machine, each loaded once.

    `tell` is called with how many problems were looked at, and how many there are.

    Raises:
        InvalidProblem: a problem multiplies nothing.
        StoreFailed: the database does not answer, or is damaged.
        KernelRejected: a library of the store does not load.
    """
    kernels: list[BundledKernel] = []
    missing: list[Missing] = []
    each = dict.fromkeys(problems)
    for done, problem in enumerate(each, start=1):
        verdict = choose(repository, problem, cpu=cpu, context=context).verdict
        found = _kernel_of(repository, verdict, cpu)
        if found is None:
            elsewhere = _other_regime(repository, verdict, cpu)
            missing.append(Missing(problem=problem, reason=elsewhere or _why_not(verdict)))
        else:
            kernels.append(found)
        tell(done, len(each))
    return tuple(kernels), tuple(missing)


def _kernel_of(repository: Repository, verdict: Verdict, cpu: Cpu) -> BundledKernel | None:
    """Return the kernel that a verdict names, if the store has it whole."""
    artifact, candidate = verdict.artifact, verdict.candidate
    if artifact is None or candidate is None:
        return None
    binary = repository.binary(artifact.sha256)
    source = repository.source_text(artifact.sha256)
    if binary is None or source is None:
        return None
    loaded = load_kernel(binary, artifact=artifact, cpu=cpu)
    return BundledKernel(
        verdict=verdict,
        candidate=candidate,
        artifact=artifact,
        binary=binary,
        source_text=source,
        description=loaded.native.describe(),
        packed_format=loaded.packed_format,
    )


def _other_regime(repository: Repository, verdict: Verdict, cpu: Cpu) -> str:
    """Say in which other regime there is a kernel, if nothing was tuned in the one asked for."""
    problem, asked = verdict.problem, verdict.context
    if verdict.basis is not Basis.NONE or not problem.operation.packs_ahead:
        return ""
    for regime in set(Regime) - {asked.regime}:
        context = replace(asked, regime=regime)
        if choose(repository, problem, cpu=cpu, context=context).verdict.artifact is not None:
            return f"it was tuned for {context_text(context)} alone; give --regime {regime.value}."
    return ""


def _why_not(verdict: Verdict) -> str:
    if verdict.artifact is not None:
        return 'its source or binary is not in the database; "gemm-tuner sweep" makes it again.'
    if verdict.doubt is not None:
        return f'its measurement decides nothing, {verdict.doubt}; run "gemm-tuner sweep" again.'
    return reason_for(
        verdict.problem.text,
        verdict.cpu_key,
        verdict.context,
        decision=verdict.decision,
        basis=verdict.basis,
        comparison=verdict.comparison,
        is_served=False,
    )
