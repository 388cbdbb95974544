"""Whether an answer fits its question: the verdict, its artifact and the kernel that was loaded.

A signature says who wrote a verdict and a digest which bytes it names, but not that they belong
together: a kernel of other sizes reads and writes behind the arrays of its caller.
"""

import json

from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import KernelRejected, SignatureInvalid
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.trust.payload import VerdictPayload


def check_verdict(
    verdict: VerdictPayload, *, problem: Problem, cpu_key: str, context: ExecutionContext
) -> None:
    """Check that a verdict answers the question that was asked.

    Raises:
        SignatureInvalid: it is for another problem, CPU or context, or names a kernel without
            saying what the kernel is.
    """
    answered = (verdict.problem, verdict.cpu_key, verdict.threads, verdict.regime.value)
    asked = (problem.text, cpu_key, context.threads, context.regime.value)
    if answered != asked:
        raise SignatureInvalid(
            f"the signed verdict is for {answered}, not for what was asked, {asked}; "
            "nothing was loaded: check the service."
        )
    if verdict.artifact is not None and verdict.candidate is None:
        raise SignatureInvalid(
            f"the signed verdict names the kernel {verdict.artifact.sha256[:12]}, but not which "
            "candidate it is; nothing was loaded: check the service."
        )


def check_kernel(kernel: Kernel, verdict: VerdictPayload, problem: Problem) -> None:
    """Check that a loaded kernel says of itself what was asked for and what was signed.

    The kernel is for this problem, or for a range of m that holds its m.

    Raises:
        KernelRejected: its problem, candidate, ABI or required features are others.
    """
    description = json.loads(kernel.native.describe())
    artifact = kernel.artifact
    said = {
        "problem": kernel.problem.text,
        "candidate": kernel.candidate.text,
        "abi_version": description.get("abi_version"),
        "required_isa": sorted(description.get("required_isa", [])),
    }
    signed = {
        "problem": said["problem"] if _computes(kernel.problem, problem) else problem.text,
        "candidate": verdict.candidate,
        "abi_version": artifact.abi_version,
        "required_isa": sorted(feature.value for feature in artifact.required_isa),
    }
    for name, value in signed.items():
        if said[name] != value:
            raise KernelRejected(
                f"kernel {artifact.sha256[:12]} says that its {name} is {said[name]!r}, but "
                f"{value!r} was asked for and signed; it is not called: check the service."
            )


def _computes(made_for: Problem, problem: Problem) -> bool:
    rows = made_for.m
    is_same_layer = made_for.layer_text == problem.layer_text
    return is_same_layer and problem.m.low in rows and problem.m.high in rows
