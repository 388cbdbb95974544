"""Where the kernel of a verdict comes from: who made it, with what, and when it was tried."""

from typing import Any

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.verdict import Basis, Verdict


def provenance_lines(verdict: Verdict) -> tuple[str, ...]:
    """Return who rendered the source, what compiled it, and when the verdict's trial was."""
    lines = []
    if verdict.generator:
        lines.append(f"source: rendered by {verdict.generator}.")
    if verdict.artifact:
        lines.append(f"binary: compiled by {_compiler_text(verdict.artifact)}.")
    if verdict.tried_at:
        done = "proved" if verdict.basis is Basis.PREDICTED else "timed"
        lines.append(f"trial: {done} on {verdict.tried_at:%Y-%m-%d at %H:%M} UTC.")
    return tuple(lines)


def provenance_facts(verdict: Verdict) -> dict[str, Any]:
    """Return the same as JSON facts, each None where it is not known."""
    artifact = verdict.artifact
    return {
        "generator": verdict.generator,
        "compiler": artifact.toolchain if artifact else None,
        "flags": list(artifact.flags) if artifact and artifact.flags else None,
        "tried_at": verdict.tried_at.isoformat() if verdict.tried_at else None,
    }


def _compiler_text(artifact: Artifact) -> str:
    if not artifact.flags:
        return f"{artifact.toolchain}, with flags that its record does not name"
    return f"{artifact.toolchain} with {' '.join(artifact.flags)}"
