"""The JSON documents of answers, as the service's `schemas` describe them.

They are made without models: to make these took as long as to sign.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from pydantic_core import to_json

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.payload import date_members, payload_facts
from gemm_tuner.trust.signature import PURPOSE, envelope_json

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

_SEPARATOR = b"\n"  # not in JSON without spaces


@dataclass(frozen=True, slots=True)
class Unsigned:
    """An answer but for its serial, its dates and its signature, as parts of JSON documents.

    `payload` has the other members of a `VerdictPayload`; `shown` those of a `Resolution` beside
    the envelope.
    """

    payload: bytes
    shown: bytes

    @classmethod
    def of(cls, verdict: Verdict, explain: Sequence[str]) -> Self:
        """Return the answer that a verdict gives, with one sentence for each of its reasons."""
        payload = payload_facts(verdict)
        measurement, artifact = verdict.measurement, verdict.artifact
        view = {name: payload[name] for name in _SHARED}
        view["measurement"] = _measurement_facts(measurement) if measurement else None
        view["artifact"] = {**_addresses(artifact), **payload["artifact"]} if artifact else None
        view["doubt"] = verdict.doubt
        view["attested_by"] = verdict.attested_by
        shown = to_json({"verdict": view, "explain": explain})
        return cls(payload=_members(to_json(payload)), shown=_members(shown))

    @classmethod
    def unpacked(cls, content: bytes) -> Self:
        """Return the answer that `packed` gave."""
        payload, _separator, shown = content.partition(_SEPARATOR)
        return cls(payload=payload, shown=shown)

    def packed(self) -> bytes:
        """Return the answer as one sequence of bytes."""
        return self.payload + _SEPARATOR + self.shown


class Signing:
    """Signs answers with a key, for the same time."""

    def __init__(self, key_pair: KeyPair, *, issued_at: datetime, expires_at: datetime) -> None:
        self._key_pair, self._key_id = key_pair, key_pair.key_id
        self._dates = _members(to_json(date_members(issued_at=issued_at, expires_at=expires_at)))

    def document(self, answer: Unsigned, serial: int) -> bytes:
        """Return the `Resolution` in JSON of an answer."""
        payload = b'{%b,%b,"serial":%d}' % (answer.payload, self._dates, serial)
        signed = envelope_json(PURPOSE, payload, self._key_pair, self._key_id)
        return b'{"signed":%b,%b}' % (signed, answer.shown)


def _members(document: bytes) -> bytes:
    """Return what is between the braces of an object in JSON."""
    return document[1:-1]


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
