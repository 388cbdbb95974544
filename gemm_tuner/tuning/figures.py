"""What timings of one problem in one context have told of its candidates."""

from dataclasses import dataclass, field

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.measurement import Measurement


@dataclass(slots=True)
class Figures:
    """The newest figures of each candidate: `speeds` compare rounds, `ratios` are to the baseline.

    `slowest_call_s` is of all that was timed, the baseline too; 0 if nothing was.
    """

    speeds: dict[Candidate, float] = field(default_factory=dict)
    ratios: dict[Candidate, float] = field(default_factory=dict)
    call_ns: dict[Candidate, float] = field(default_factory=dict)
    slowest_call_s: float = 0.0

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Take over what a timing says of a candidate."""
        self.speeds[candidate] = measurement.comparable_speed
        self.ratios[candidate] = measurement.ratio.median
        call_ns = self.call_ns[candidate] = measurement.candidate.median_ns
        slowest_ns = max(call_ns, measurement.baseline_timing.median_ns)
        self.slowest_call_s = max(self.slowest_call_s, slowest_ns / 1e9)

    def forget(self, candidate: Candidate) -> None:
        """Rank a candidate no more."""
        self.speeds.pop(candidate, None)

    def ranked(self) -> list[Candidate]:
        """Return the candidates, fastest first."""
        return sorted(self.speeds, key=lambda one: (-self.speeds[one], one.text))
