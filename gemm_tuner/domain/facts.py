"""What is told of nouns as JSON, wherever it is told: in answers, reports and stored verdicts."""

from typing import Any

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.measurement import Ratio


def artifact_facts(artifact: Artifact) -> dict[str, Any]:
    """Return what is told of a kernel, but for the flags of its compiler."""
    return {
        "sha256": artifact.sha256,
        "size_bytes": artifact.size_bytes,
        "abi_version": artifact.abi_version,
        "required_isa": sorted(artifact.required_isa),
        "toolchain": artifact.toolchain,
        "source_sha256": artifact.source_sha256,
    }


def ratio_facts(ratio: Ratio) -> dict[str, float]:
    """Return a speed over another, with the interval of its median."""
    return {
        "median": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "of_minimums": ratio.of_minimums,
    }
