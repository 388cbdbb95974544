"""The noise score: how evenly two fixed loops run, one of arithmetic and one of reads."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import monotonic

from gemm_tuner.doctor.loops import Loop
from gemm_tuner.domain.check import Check, Figure, Level, worst
from gemm_tuner.machine.processors import (
    ProcessorUse,
    processor_use,
    read_processor_times,
    thread_wait_ns,
)
from gemm_tuner.machine.system import SystemFiles

WATCH_S = 2.0
_LEAST_SAMPLES = 20
_WARM_UP_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Up to which score a loop is good, and beyond which it is a problem."""

    good: float
    worst: float


# On a virtual machine of two cores (Zen 4, 2026-11-23) arithmetic scores 1.05 to 1.08. Reads beside
# a process that adds large arrays score 1.25 and more, and their median is twice the fastest of
# before. The worst of arithmetic is the disagreement between the median and the fastest samples at
# which a measurement decides nothing: domain/doubt.py.
LIMITS: Mapping[str, Limits] = {
    "arithmetic": Limits(good=1.10, worst=1.25),
    "reads": Limits(good=1.20, worst=1.50),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The times of one loop, in ns: all samples did the same work."""

    loop: str
    identity: str
    times_ns: tuple[int, ...]

    @property
    def score(self) -> float:
        """Return the 95th percentile over the minimum: 1 where nothing disturbs."""
        ordered = sorted(self.times_ns)
        return ordered[ceil(0.95 * len(ordered)) - 1] / max(1, ordered[0])

    @property
    def fastest_ns(self) -> int:
        """Return the time of the fastest sample."""
        return min(self.times_ns)

    @property
    def median_ns(self) -> float:
        """Return the time of the median sample."""
        return median(self.times_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What was seen while the loops ran in turn.

    `use` is what the usable CPUs did, None if it is not known. `waited` is the share of the time in
    which this process was ready to run and others ran; None if the system does not tell.
    """

    samples: tuple[Samples, ...]
    size_bytes: int
    use: ProcessorUse | None
    waited: float | None


def watch(
    loops: Sequence[Loop],
    *,
    size_bytes: int,
    files: SystemFiles,
    usable: Collection[int],
    ticks_per_s: int,
    tell: Callable[[float], None],
    seconds: float,
    clock: Callable[[], float] = monotonic,
) -> Watch:
    """Run the loops in turn for some time; `tell` is told how many seconds have passed."""
    times: dict[str, list[int]] = {loop.name: [] for loop in loops}
    start_s = clock()
    while clock() - start_s < _WARM_UP_S:
        for loop in loops:
            loop.run()
    stat, tasks = files.path("proc/stat"), files.path("proc/self/task")
    before, waited_ns, start_s = read_processor_times(usable, stat), thread_wait_ns(tasks), clock()
    while (spent_s := clock() - start_s) < seconds or min(
        map(len, times.values())
    ) < _LEAST_SAMPLES:
        tell(spent_s)
        for loop in loops:
            times[loop.name].append(max(1, loop.run()))
    after = read_processor_times(usable, stat)
    share = (thread_wait_ns(tasks) - waited_ns) / (spent_s * 1e9)
    return Watch(
        samples=tuple(
            Samples(loop=loop.name, identity=loop.identity, times_ns=tuple(times[loop.name]))
            for loop in loops
        ),
        size_bytes=size_bytes,
        use=processor_use(before, after, cpus=len(usable), ticks_per_s=ticks_per_s),
        waited=share if tasks.is_dir() else None,
    )


def check_noise(seen: Watch, slower: Mapping[str, float]) -> Check:
    """Say how evenly the loops ran, and how much slower than ever before here.

    `slower` is, by the name of a loop, its median sample over the fastest that was seen in earlier
    checks; a loop that never ran before is not in it.
    """
    parts, levels = [], []
    figures: dict[str, Figure] = {"block_bytes": seen.size_bytes}
    for one in seen.samples:
        limits, factor = LIMITS[one.loop], slower.get(one.loop)
        levels += [_level(value, limits) for value in (one.score, factor or 1.0)]
        text = f"{one.loop} {one.score:.2f} (good: up to {limits.good:.2f})"
        if factor is not None and factor > limits.good:
            text += f", its median {factor:.2f} times the fastest of earlier checks"
        parts.append(text)
        figures |= {
            f"{one.loop}_score": round(one.score, 4),
            f"{one.loop}_fastest_ns": one.fastest_ns,
            f"{one.loop}_median_ns": one.median_ns,
            f"{one.loop}_samples": len(one.times_ns),
            f"{one.loop}_median_over_fastest_known": None if factor is None else round(factor, 4),
        }
    level = worst(*levels)
    return Check(
        name="noise",
        level=level,
        seen=f"95th percentile of the times over the least: {'; '.join(parts)}",
        advice=""
        if level is Level.OK
        else "stop what else runs, here and on the host, and tune "
        "again; a shared machine is calmer at another time",
        figures=figures,
    )


def _level(score: float, limits: Limits) -> Level:
    if score > limits.worst:
        return Level.PROBLEM
    return Level.NOTE if score > limits.good else Level.OK
