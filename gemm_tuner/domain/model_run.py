"""A whole model that was run in several ways, in alternation, and what that lets one say."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from gemm_tuner.domain.doubt import DISTURBED, MOST_DISTURBED_ROUNDS, SLOWED, why_disturbed
from gemm_tuner.domain.measurement import Interference, Measurement, Ratio, Timing

LONGEST_NS = 2**44  # five hours


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """What is run: a model in a type of numbers, on some threads, with a batch.

    One that `is_small` has the structure of the model and few weights: it shows that ways work, and
    says nothing of speed.
    """

    model: str
    dtype: str
    threads: int
    batch: int
    is_small: bool = False

    @property
    def text(self) -> str:
        """Return the case in one line."""
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        small = ", small" if self.is_small else ""
        return f"{self.model} {self.dtype}, {threads}, batch {self.batch}{small}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCalls:
    """A linear layer with constant weights, or several that are alike, in one call of a model."""

    m: int
    n: int
    k: int
    has_bias: bool
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Shares of the time of a call: in linear layers with our kernels, and in those without."""

    taken: float
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WayRun:
    """One way to run a model: its times, or the `reason` why it is no result.

    `package` is what it is of, with its version, and `settings` are how it was asked. A sample is
    the median time of a call in one round, in ns; `disturbed` says of each whether its threads
    waited for a core. `error` is the largest distance of an output from the one in f32, over the
    largest element of that, and `agreement` the share of rows whose largest element is where it is
    in f32. `ready_s` is how long it took until it could be timed. `taken` and
    `left` count linear layers, and `why_left` says why each kind of them was left, of our ways. A
    reason that `may_pass` is of the moment, such as memory that was short.
    """

    way: str
    package: str
    is_ours: bool
    settings: dict[str, str]
    samples_ns: tuple[int, ...] = ()
    disturbed: tuple[bool, ...] = ()
    error: float | None = None
    agreement: float | None = None
    ready_s: float | None = None
    shares: TimeShares | None = None
    taken: int | None = None
    left: int | None = None
    why_left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""
    may_pass: bool = False

    @property
    def is_result(self) -> bool:
        """Say whether its times count."""
        return not self.reason

    @property
    def timing(self) -> Timing:
        """Return the samples as a timing."""
        return Timing(calls_per_sample=1, samples_ns=self.samples_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimit:
    """What a call takes at least: what `way` takes outside of layers, and these at the roof.

    `layers_s` is the sum over the layers of the longer of arithmetic, at `peak_flop_per_s`, and of
    reading, at `read_bytes_per_s`; both are of one core, times the threads.
    """

    way: str
    outside_s: float
    layers_s: float
    peak_flop_per_s: float
    read_bytes_per_s: float

    @property
    def seconds(self) -> float:
        """Return the time of a call."""
        return self.outside_s + self.layers_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConditions:
    """What surrounded the rounds: the machine, the versions and the day, in ISO 8601.

    `built_with` are the packages that made the model, with their versions.
    """

    cpu: str
    cpu_key: str
    kernel_release: str
    huge_pages: str
    generator: str
    measured_at: str
    stolen: float
    others: float
    built_with: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """All ways to run one model, timed in turn: sample i of each is of round i.

    `why_no_limit` says why there is no `limit`.
    """

    case: ModelCase
    rounds: int
    ways: tuple[WayRun, ...]
    conditions: ModelConditions
    limit: ModelLimit | None = None
    why_no_limit: str = ""

    def __post_init__(self) -> None:
        """Check that each result has a sample of each round.

        Raises:
            ValueError: it has not.
        """
        for way in self.ways:
            if way.is_result and not (
                len(way.samples_ns) == len(way.disturbed) == self.rounds > 0
                and min(way.samples_ns) > 0
                and max(way.samples_ns) < LONGEST_NS
            ):
                raise ValueError(f"{way.way} has no time for each of {self.rounds} rounds")

    @property
    def is_settled(self) -> bool:
        """Say whether there is a result, and no way failed for a reason that may pass."""
        return self.has_result and not any(one.may_pass for one in self.ways)

    @property
    def has_result(self) -> bool:
        """Say whether any way is a result."""
        return any(one.is_result for one in self.ways)

    @cached_property
    def ours(self) -> WayRun | None:
        """Return the fastest of our ways, None where none is a result."""
        return _fastest([one for one in self.ways if one.is_ours and one.is_result])

    @cached_property
    def rival(self) -> WayRun | None:
        """Return the fastest of the other ways, None where none is a result."""
        return _fastest([one for one in self.ways if not one.is_ours and one.is_result])

    @cached_property
    def measurement(self) -> Measurement | None:
        """Return our way beside the fastest other, None where one is missing."""
        return self.beside(self.rival) if self.rival else None

    def beside(self, other: WayRun) -> Measurement | None:
        """Return our way beside another, round by round."""
        ours = self.ours
        if ours is None:
            return None
        pairs = list(zip(ours.disturbed, other.disturbed, strict=True))
        return Measurement(
            candidate=ours.timing,
            baseline=other.way,
            baseline_timing=other.timing,
            interference=Interference(
                disturbed_rounds=sum(any(pair) for pair in pairs) / len(pairs),
                stolen=self.conditions.stolen,
                others=self.conditions.others,
            ),
        )

    @property
    def ratio(self) -> Ratio | None:
        """Return our speed over that of the fastest other way, None where one is missing."""
        return self.measurement.ratio if self.measurement else None

    @property
    def doubt(self) -> str | None:
        """Return why the ratio is not believed, None if it may be or there is none."""
        if self.measurement is None:
            return None
        missing = [
            one.way for one in self.ways if one.may_pass and not (one.is_ours or one.is_result)
        ]
        if missing:
            return (
                f"not beside {', '.join(missing)}, which may be faster: see why that is no result"
            )
        return self._why_slowed() or why_disturbed(self.measurement)

    def _why_slowed(self) -> str | None:
        """Return the evidence that a neighbour slowed the rounds of either way, or None."""
        for way in filter(None, (self.ours, self.rival)):
            fastest_ns = min(way.samples_ns)
            slowed = sum(one > SLOWED * fastest_ns for one in way.samples_ns)
            if slowed > MOST_DISTURBED_ROUNDS * self.rounds:
                return (
                    f"{DISTURBED}: in {slowed} of {self.rounds} rounds {way.way} took more than "
                    f"{SLOWED} times its least"
                )
        return None

    @property
    def share_of_limit(self) -> float | None:
        """Return the limit over our time, None where one is missing."""
        if self.limit is None or self.ours is None:
            return None
        return self.limit.seconds * 1e9 / self.ours.timing.median_ns

    @property
    def alike(self) -> tuple[object, ...]:
        """Return what two runs have in common that were measured alike."""
        return (
            *(self.case.dtype, self.case.threads, self.case.batch, self.case.is_small),
            *(self.conditions.cpu_key, self.conditions.generator, self.rounds),
            self.conditions.built_with,
            tuple((one.way, one.package) for one in self.ways),
        )


def _fastest(ways: Sequence[WayRun]) -> WayRun | None:
    return min(ways, key=lambda one: median(one.samples_ns), default=None)
