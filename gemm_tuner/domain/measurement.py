"""Times of a candidate beside its baseline, and what they allow one to say."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb, fsum, log, sqrt
from statistics import median, median_low

from gemm_tuner.domain.context import Regime
from gemm_tuner.errors import InvalidRecord

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A speed over another speed: the median of paired samples with its confidence interval.

    `of_minimums` is the same ratio taken from the fastest sample of each side.
    """

    median: float
    low: float
    high: float
    of_minimums: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Raw samples of one runner: each is the time of `calls_per_sample` calls, in ns."""

    calls_per_sample: int
    samples_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that there is something to speak of."""
        if self.calls_per_sample < 1 or not self.samples_ns or min(self.samples_ns) < 1:
            raise InvalidRecord("a timing needs at least one call and positive samples.")

    def first(self, count: int) -> "Timing":
        """Return the timing of the first `count` samples."""
        return replace(self, samples_ns=self.samples_ns[:count])

    @property
    def minimum_ns(self) -> float:
        """Return the time of one call in the fastest sample, in ns."""
        return min(self.samples_ns) / self.calls_per_sample

    @property
    def median_ns(self) -> float:
        """Return the time of one call in the median sample, in ns."""
        return median(self.samples_ns) / self.calls_per_sample

    @property
    def interval_ns(self) -> tuple[float, float]:
        """Return the interval of the median, in ns, as that of a ratio is made."""
        ordered, outer = sorted(self.samples_ns), _order_of_interval(len(self.samples_ns))
        calls = self.calls_per_sample
        return ordered[outer] / calls, ordered[-1 - outer] / calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """The share of a measurement that other work took.

    `disturbed_rounds` is the share of the rounds in which threads of the candidate or of the
    baseline were ready to run, but another process had their core for a part of the sample that
    matters. `stolen` is the share of the processors' time that the hypervisor gave to other
    machines. `others` is how many cores other processes kept busy.
    """

    disturbed_rounds: float
    stolen: float
    others: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Between what the times of a plausible measurement lie, in ns.

    `least_ns` is what arithmetic and reading of a call take at least, with a margin. Where the
    ratio was large, `plain_ns` is the time of a call of the baseline without the epilogue, and
    `epilogue_ns` a generous time for that in a pass of its own.
    """

    least_ns: float
    plain_ns: float | None = None
    epilogue_ns: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """A library of the race for the baseline: the package that it is of.

    `baseline` names it as a measurement would, and `call_ns` is the least time of a call; they are
    empty and 0 if it could not be used, for this `reason`. One that `lacked_time` did not take
    part: it takes longer to start than the race could last. The race was in a `regime`: its
    weights were in the caches or in memory.
    """

    package: str
    baseline: str
    call_ns: float
    reason: str = ""
    regime: Regime = Regime.HOT
    lacked_time: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether it could be used, and was timed."""
        return bool(self.baseline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library that a kernel was compared with: its name and version, as in a measurement.

    `package` is what it was installed by, empty where it was not raced.
    """

    text: str
    package: str = ""

    @property
    def name(self) -> str:
        """Return the name without the version: `mkl` of `mkl 2026.2.0`."""
        return self.text.partition(" ")[0]

    def is_version_of(self, text: str) -> bool:
        """Say whether the library with this text is the same, whatever it does in passes."""
        return self.text.split()[:2] == text.split()[:2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Samples of a candidate and of its baseline, taken in turn in one process; they pair up.

    `interference` is None in older records.
    """

    candidate: Timing
    baseline_timing: Timing
    interference: Interference | None = None

    def __post_init__(self) -> None:
        """Check that the samples pair up."""
        if len(self.candidate.samples_ns) != len(self.baseline_timing.samples_ns):
            raise InvalidRecord("interleaved samples of candidate and baseline must pair up.")

    @property
    def ratio(self) -> Ratio:
        """Return the speed of the candidate over the speed of the baseline."""
        return paired_speed_ratio(self.candidate, self.baseline_timing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(Rounds):
    """Samples of a candidate and of its baseline, taken in alternation: pair i is one A and one B.

    Where it was repeated in other processes, the samples are those of the one with the median
    ratio, and `repeats` are the rounds of the others.
    `baseline` names the library and its version. `implementation` says by which of its
    implementations it computed and how it was asked: `brg:avx512_core: fused`. `raced` are the
    libraries between which it was chosen, the fastest first, if it was. `limits` are None in older
    records.
    """

    baseline: str
    limits: Limits | None = None
    implementation: str = ""
    raced: tuple[Raced, ...] = ()
    repeats: tuple[Rounds, ...] = ()

    @property
    def processes(self) -> tuple[Rounds, ...]:
        """Return the rounds of each process in which this was measured."""
        own = Rounds(
            candidate=self.candidate,
            baseline_timing=self.baseline_timing,
            interference=self.interference,
        )
        return (own, *self.repeats)

    @property
    def ratio(self) -> Ratio:
        """Return the speed of the candidate over the speed of the baseline.

        Of several processes, the interval covers that of each, and the ratio of the fastest samples
        is the least.
        """
        ratios = [rounds.ratio for rounds in self.processes]
        return Ratio(
            median=median_low(ratio.median for ratio in ratios),
            low=min(ratio.low for ratio in ratios),
            high=max(ratio.high for ratio in ratios),
            of_minimums=min(ratio.of_minimums for ratio in ratios),
        )

    @property
    def comparable_speed(self) -> float:
        """Return the sort key of kernels of one problem that were timed in different rounds.

        It is the geometric mean of two speeds, that over the baseline and that in calls per ns, of
        the fastest samples. What disturbs the baseline alone misleads the first, and what disturbs
        all alike the second; each has half the weight (docs/decisions/0023). Of several processes
        it is the median, the slower of two.
        """
        return median_low(
            sqrt(rounds.ratio.of_minimums / rounds.candidate.minimum_ns)
            for rounds in self.processes
        )


def of_several_processes(
    of_each: Sequence[Sequence[Measurement]],
) -> tuple[int, tuple[Measurement, ...]]:
    """Return one measurement of each kernel that was timed with others in several processes.

    All of them are of the process with the median ratio, the slower of two, by the mean of the
    kernels, with the rounds of the others: so what had the same rounds still shows it. The first
    value is the place of that process.

    Args:
        of_each: of each process, the measurements of all kernels beside the same baseline.
    """
    order = sorted(
        range(len(of_each)),
        key=lambda place: fsum(log(one.ratio.median) for one in of_each[place]),
    )
    middle = order.pop((len(order) - 1) // 2)
    return middle, tuple(
        replace(one, repeats=tuple(of_each[place][kernel].processes[0] for place in order))
        for kernel, one in enumerate(of_each[middle])
    )


def paired_speed_ratio(subject: Timing, reference: Timing) -> Ratio:
    """Return how many times faster `subject` is than `reference`, from paired samples.

    The interval is the distribution-free one for a median, from order statistics.

    Source: Hahn and Meeker, Statistical Intervals, section 5.2.
    """
    scale = subject.calls_per_sample / reference.calls_per_sample
    ratios = sorted(
        scale * theirs / ours
        for ours, theirs in zip(subject.samples_ns, reference.samples_ns, strict=True)
    )
    outer = _order_of_interval(len(ratios))
    return Ratio(
        median=median(ratios),
        low=ratios[outer],
        high=ratios[-1 - outer],
        of_minimums=reference.minimum_ns / subject.minimum_ns,
    )


def _order_of_interval(count: int) -> int:
    """Return how many samples to drop at each end for the wanted confidence."""
    tail, order = 0.0, 0
    while order < (count - 1) // 2:
        tail += comb(count, order) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            return max(0, order - 1) if order else 0
        order += 1
    return max(0, order - 1)
