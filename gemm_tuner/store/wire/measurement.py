"""The JSON form of a measurement: samples of a kernel and of its baseline, in pairs."""

from typing import Annotated, Self

from pydantic import Field

from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.measurement import (
    Interference,
    Limits,
    Measurement,
    Raced,
    Rounds,
    Timing,
)
from gemm_tuner.store.wire.members import MAX_LINE, Line
from gemm_tuner.strict_model import StrictModel

MAX_SAMPLES = 100_000

Share = Annotated[float, Field(ge=0, le=1)]


class WireTiming(StrictModel):
    """Raw samples, each the time of `calls_per_sample` calls."""

    calls_per_sample: Annotated[int, Field(ge=1, lt=2**53)]
    samples_ns: Annotated[
        tuple[Annotated[int, Field(ge=1, lt=2**53)], ...],
        Field(min_length=1, max_length=MAX_SAMPLES),
    ]

    @classmethod
    def of(cls, timing: Timing) -> Self:
        """Return the JSON form of `timing`."""
        return cls(calls_per_sample=timing.calls_per_sample, samples_ns=timing.samples_ns)

    def to_domain(self) -> Timing:
        """Return the timing."""
        return Timing(calls_per_sample=self.calls_per_sample, samples_ns=self.samples_ns)


class WireInterference(StrictModel):
    """What other work took from a measurement: shares of it, and a number of cores."""

    disturbed_rounds: Share
    stolen: Share
    others: Annotated[float, Field(ge=0)]

    @classmethod
    def of(cls, interference: Interference) -> Self:
        """Return the JSON form of `interference`."""
        return cls(
            disturbed_rounds=interference.disturbed_rounds,
            stolen=interference.stolen,
            others=interference.others,
        )

    def to_domain(self) -> Interference:
        """Return the interference."""
        return Interference(
            disturbed_rounds=self.disturbed_rounds, stolen=self.stolen, others=self.others
        )


class WireLimits(StrictModel):
    """Between what the times of a plausible measurement lie, in ns."""

    least_ns: Annotated[float, Field(ge=0)]
    plain_ns: Annotated[float | None, Field(ge=0)] = None
    epilogue_ns: Annotated[float | None, Field(ge=0)] = None

    @classmethod
    def of(cls, limits: Limits) -> Self:
        """Return the JSON form of `limits`."""
        return cls(
            least_ns=limits.least_ns, plain_ns=limits.plain_ns, epilogue_ns=limits.epilogue_ns
        )

    def to_domain(self) -> Limits:
        """Return the limits."""
        return Limits(least_ns=self.least_ns, plain_ns=self.plain_ns, epilogue_ns=self.epilogue_ns)


class WireRaced(StrictModel):
    """A library between which and others the baseline was chosen."""

    package: Line
    baseline: Line
    call_ns: Annotated[float, Field(ge=0)]
    reason: Annotated[Line, Field(exclude_if=lambda reason: not reason)] = ""
    regime: Annotated[Regime, Field(exclude_if=lambda regime: regime is Regime.HOT)] = Regime.HOT
    lacked_time: Annotated[bool, Field(exclude_if=lambda lacked: not lacked)] = False

    @classmethod
    def of(cls, raced: Raced) -> Self:
        """Return the JSON form of `raced`."""
        return cls(
            package=raced.package,
            baseline=raced.baseline,
            call_ns=raced.call_ns,
            reason=raced.reason[:MAX_LINE],
            regime=raced.regime,
            lacked_time=raced.lacked_time,
        )

    def to_domain(self) -> Raced:
        """Return the library."""
        return Raced(
            package=self.package,
            baseline=self.baseline,
            call_ns=self.call_ns,
            reason=self.reason,
            regime=self.regime,
            lacked_time=self.lacked_time,
        )


class WireRounds(StrictModel):
    """Samples of a candidate and of its baseline in one more process, in pairs."""

    candidate: WireTiming
    baseline_timing: WireTiming
    interference: Annotated[
        WireInterference | None, Field(exclude_if=lambda interference: interference is None)
    ] = None

    @classmethod
    def of(cls, rounds: Rounds) -> Self:
        """Return the JSON form of `rounds`."""
        return cls(
            candidate=WireTiming.of(rounds.candidate),
            baseline_timing=WireTiming.of(rounds.baseline_timing),
            interference=WireInterference.of(rounds.interference) if rounds.interference else None,
        )

    def to_domain(self) -> Rounds:
        """Return the rounds."""
        return Rounds(
            candidate=self.candidate.to_domain(),
            baseline_timing=self.baseline_timing.to_domain(),
            interference=self.interference.to_domain() if self.interference else None,
        )


class WireMeasurement(StrictModel):
    """Samples of a candidate and of its baseline, in pairs."""

    candidate: WireTiming
    baseline: Line
    baseline_timing: WireTiming
    # Left out where it is not known, so that records without it stay what they are.
    interference: Annotated[
        WireInterference | None, Field(exclude_if=lambda interference: interference is None)
    ] = None
    limits: Annotated[WireLimits | None, Field(exclude_if=lambda limits: limits is None)] = None
    # Left out where they are empty, so that records without them stay what they are.
    implementation: Annotated[Line, Field(exclude_if=lambda text: not text)] = ""
    raced: Annotated[
        tuple[WireRaced, ...], Field(max_length=100, exclude_if=lambda raced: not raced)
    ] = ()
    repeats: Annotated[
        tuple[WireRounds, ...], Field(max_length=100, exclude_if=lambda repeats: not repeats)
    ] = ()

    @classmethod
    def of(cls, measurement: Measurement) -> Self:
        """Return the JSON form of `measurement`."""
        return cls(
            candidate=WireTiming.of(measurement.candidate),
            baseline=measurement.baseline,
            baseline_timing=WireTiming.of(measurement.baseline_timing),
            interference=WireInterference.of(measurement.interference)
            if measurement.interference
            else None,
            limits=WireLimits.of(measurement.limits) if measurement.limits else None,
            implementation=measurement.implementation[:MAX_LINE],
            raced=tuple(map(WireRaced.of, measurement.raced)),
            repeats=tuple(map(WireRounds.of, measurement.repeats)),
        )

    def to_domain(self) -> Measurement:
        """Return the measurement."""
        return Measurement(
            candidate=self.candidate.to_domain(),
            baseline=self.baseline,
            baseline_timing=self.baseline_timing.to_domain(),
            interference=self.interference.to_domain() if self.interference else None,
            limits=self.limits.to_domain() if self.limits else None,
            implementation=self.implementation,
            raced=tuple(one.to_domain() for one in self.raced),
            repeats=tuple(one.to_domain() for one in self.repeats),
        )
