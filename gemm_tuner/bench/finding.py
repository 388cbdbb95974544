"""The result of a candidate in a trial."""

from dataclasses import dataclass, field

from gemm_tuner.bench.sample import Sample
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.measurement import Measurement, Timing
from gemm_tuner.domain.record import Conditions, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome; `detail` says in words what went wrong.

    `emulated` are the features that this CPU lacks and that were emulated for the proof.
    """

    outcome: Outcome
    detail: str = ""
    emulated: frozenset[IsaFeature] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFinding:
    """The outcome of a timing, with a measurement for each baseline if the candidate lived.

    There is none either where only this build did not fit into memory; `detail` says so.

    All measurements, and the peak among the conditions, were taken in the same rounds, as was the
    `roofline`, where it was asked for: what no call can be faster than.
    `left_out` says by name why a baseline is not among them. `samples` are those of the candidate
    and of the first baseline, where every sample was to be kept.
    """

    finding: Finding
    measurements: tuple[Measurement, ...] = ()
    conditions: Conditions | None = None
    roofline: Timing | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    samples: tuple[tuple[Sample, ...], tuple[Sample, ...]] | None = None

    @property
    def measurement(self) -> Measurement | None:
        """Return the measurement beside the first baseline."""
        return self.measurements[0] if self.measurements else None


TIMED_FINDINGS = tuple[TimedFinding, ...]
