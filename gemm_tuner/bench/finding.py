"""What came of a candidate in a trial."""

from dataclasses import dataclass

from gemm_tuner.domain.measurement import Measurement
from gemm_tuner.domain.record import Conditions, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome; `detail` says in words what went wrong."""

    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFinding:
    """The outcome of a timing, with the measurement if the candidate lived through it.

    The peak among the conditions was measured in the same rounds.
    """

    finding: Finding
    measurement: Measurement | None = None
    conditions: Conditions | None = None
