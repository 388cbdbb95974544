"""The use of the processors between two moments: by this process, by others, and idle."""

import os
import resource
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_TASKS = Path("/proc/self/task")
_SCHEDSTAT_BYTES = 128
# The fields of a line of /proc/stat, man 5 proc: idle and iowait are nobody's time.
_IDLE_FIELDS = (3, 4)
_STEAL_FIELD = 7
_TIME_FIELDS = 8  # guest time, behind them, is counted in user time already
# The clock of /proc/stat is coarse: in less time, one tick looks like a large share.
_LEAST_S = 0.1
_LEAST_STOLEN_TICKS = 3

USUAL_LOAD_CORES = 0.3  # what every machine does beside, from time to time


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorTimes:
    """Time since the start of the machine, in ticks, summed over the processors usable here.

    `own_s` is what this process has used, in seconds.
    """

    idle: int
    stolen: int
    total: int
    own_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """How the usable processors were used: `stolen` is a share, the others are numbers of cores."""

    stolen: float
    others: float
    idle: float


def read_processor_times(cpus: Collection[int] | None = None, stat: Path = _STAT) -> ProcessorTimes:
    """Return the times of `cpus`, by default of those that this process may use.

    Where the system does not tell them, they are 0.
    """
    names = {f"cpu{number}" for number in (cpus or os.sched_getaffinity(0))}
    idle = stolen = total = 0
    with suppress(OSError):
        for line in stat.read_text().splitlines():
            name, *fields = line.split()
            if name in names:
                ticks = [int(field) for field in fields[:_TIME_FIELDS]]
                idle += sum(ticks[field] for field in _IDLE_FIELDS)
                stolen += ticks[_STEAL_FIELD] if len(ticks) > _STEAL_FIELD else 0
                total += sum(ticks)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return ProcessorTimes(
        idle=idle, stolen=stolen, total=total, own_s=used.ru_utime + used.ru_stime
    )


def processor_use(
    begin: ProcessorTimes, end: ProcessorTimes, *, cpus: int, ticks_per_s: int
) -> ProcessorUse | None:
    """Return the use of `cpus` processors between two moments; None if they are too close."""
    total = end.total - begin.total
    if total < _LEAST_S * cpus * ticks_per_s:
        return None
    ticks_of_core = total / cpus
    stolen = end.stolen - begin.stolen
    busy = total - (end.idle - begin.idle) - stolen
    own = (end.own_s - begin.own_s) * ticks_per_s
    return ProcessorUse(
        stolen=stolen / total if stolen >= _LEAST_STOLEN_TICKS else 0.0,
        others=max(0.0, busy - own) / ticks_of_core,
        idle=(end.idle - begin.idle) / ticks_of_core,
    )


def use_since(begin: ProcessorTimes) -> ProcessorUse | None:
    """Return the use of the processors usable here since `begin`, if enough time has passed."""
    return processor_use(
        begin,
        read_processor_times(),
        cpus=len(os.sched_getaffinity(0)),
        ticks_per_s=os.sysconf("SC_CLK_TCK"),
    )


def thread_wait_ns(tasks: Path = _TASKS) -> int:
    """Return how long the threads of this process were ready to run while others ran, in ns.

    It is 0 where the system does not tell.
    """
    return sum(_waits(tasks))


def _waits(tasks: Path) -> Iterator[int]:
    with suppress(OSError):
        for task in os.listdir(tasks):  # noqa: PTH208 - called before each sample
            with suppress(OSError, IndexError, ValueError):  # the thread may have ended
                descriptor = os.open(f"{tasks}/{task}/schedstat", os.O_RDONLY)
                try:
                    yield int(os.read(descriptor, _SCHEDSTAT_BYTES).split()[1])
                finally:
                    os.close(descriptor)
