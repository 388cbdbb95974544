"""What a measurement says: all that a verdict keeps of it."""

from dataclasses import dataclass
from typing import Self

from gemm_tuner.domain.doubt import why_doubted
from gemm_tuner.domain.measurement import Measurement, Raced, Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The times of one call of a candidate and of its baseline, in ns, and their ratio.

    `baseline`, `implementation` and `raced` are those of the measurement. `doubt` says why it
    decides nothing, None if it does. `process_ratios` are
    those of each process that it was measured in.
    """

    ratio: Ratio
    process_ratios: tuple[Ratio, ...]
    candidate_median_ns: float
    baseline_median_ns: float
    baseline: str
    implementation: str = ""
    raced: tuple[Raced, ...] = ()
    doubt: str | None = None

    @classmethod
    def of(cls, measurement: Measurement) -> Self:
        """Return what `measurement` says."""
        return cls(
            ratio=measurement.ratio,
            candidate_median_ns=measurement.candidate.median_ns,
            baseline_median_ns=measurement.baseline_timing.median_ns,
            baseline=measurement.baseline,
            implementation=measurement.implementation,
            raced=measurement.raced,
            doubt=why_doubted(measurement),
            process_ratios=tuple(rounds.ratio for rounds in measurement.processes),
        )
