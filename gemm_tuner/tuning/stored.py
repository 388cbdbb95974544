"""From a verdict of a database to its kernel."""

from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.reason import reason_for
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.libraries.fallback import NoKernel
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.store.repository import Repository


def kernel_or_none(
    verdict: Verdict, repository: Repository, cpu: Cpu, threads: int
) -> Kernel | NoKernel:
    """Return the kernel that a verdict names, loaded for `threads` threads, or why there is none.

    Raises:
        KernelRejected: its bytes are damaged, or it is for another ABI.
        IsaNotUsable: it needs features that are not usable here.
    """
    reason = reason_for(
        verdict.problem.text,
        verdict.cpu_key,
        verdict.context,
        decision=verdict.decision,
        basis=verdict.basis,
        comparison=verdict.comparison,
        is_served=verdict.artifact is not None,
    )
    artifact = verdict.artifact
    binary = repository.binary(artifact.sha256) if artifact else None
    if artifact is None or binary is None:
        return NoKernel.of(reason, verdict.comparison)
    return load_kernel(
        binary,
        artifact=artifact,
        cpu=cpu,
        threads=threads,
        reason=reason,
        comparison=verdict.comparison,
    )
