"""The JSON documents of answers, as `schemas` describes them.

They are made without models: to make these took as long as to sign.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.trust.signature import SignedVerdict

# The members of a verdict that its payload has too.
_SHARED = (
    "problem",
    "cpu_key",
    "threads",
    "regime",
    "decision",
    "basis",
    "complete",
    "candidate",
)


def resolution_document(
    signed: SignedVerdict, payload: Mapping[str, Any], verdict: Verdict, explain: Sequence[str]
) -> bytes:
    """Return the `Resolution` of a verdict with the members of its payload."""
    measurement, artifact = verdict.measurement, verdict.artifact
    view = {name: payload[name] for name in _SHARED}
    view["measurement"] = _measurement_facts(measurement) if measurement else None
    view["artifact"] = {**_addresses(artifact), **payload["artifact"]} if artifact else None
    view["doubt"] = verdict.doubt
    view["attested_by"] = verdict.attested_by
    envelope = {
        "payload": signed.payload,
        "signature": signed.signature,
        "key_id": signed.key_id,
    }
    return to_json({"signed": envelope, "verdict": view, "explain": explain})


def batch_item(text: str, resolution: bytes) -> bytes:
    """Return the `BatchItem` of a problem that has a resolution."""
    return b'{"problem":%b,"resolution":%b,"error":null}' % (to_json(text), resolution)


def _measurement_facts(measurement: Evidence) -> dict[str, Any]:
    ratio = measurement.ratio
    return {
        "candidate_median_ns": measurement.candidate_median_ns,
        "baseline": measurement.baseline,
        "baseline_median_ns": measurement.baseline_median_ns,
        "speed_ratio": ratio.median,
        "speed_ratio_low": ratio.low,
        "speed_ratio_high": ratio.high,
    }


def _addresses(artifact: Artifact) -> dict[str, str]:
    url = f"/v1/artifacts/sha256/{artifact.sha256}"
    return {"url": url, "source_url": f"{url}/source"}
