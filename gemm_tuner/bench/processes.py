"""Time builds in several processes: one alone says how fast they are there, not elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from gemm_tuner.bench.finding import TimedFinding
from gemm_tuner.domain.doubt import why_interfered
from gemm_tuner.domain.measurement import of_several_processes

_TRIES_OF_EACH = 2

Timed = TypeVar("Timed")


def time_in_processes(
    builds: Sequence[Timed],
    time_in: Callable[[int, Sequence[Timed]], tuple[TimedFinding, ...]],
    processes: int,
) -> tuple[TimedFinding, ...]:
    """Return what several processes found of some builds, with the measurements of all of them.

    `time_in` times them in the process of a number, from 0 on. What other work disturbed is timed
    once more in another process. The scheduler's counts ask for that, never the ratio, so it
    favours nobody. A build that is not timed in a process is out, with what was found of it there,
    and the others are timed anew without it.
    """
    out: dict[int, TimedFinding] = {}
    while living := [place for place in range(len(builds)) if place not in out]:
        found = _in_processes([builds[place] for place in living], time_in, processes)
        of_place = dict(zip(living, found, strict=True))
        untimed = {place: one for place, one in of_place.items() if one.measurement is None}
        out |= untimed or of_place
    return tuple(out[place] for place in range(len(builds)))


def _in_processes(
    builds: Sequence[Timed],
    time_in: Callable[[int, Sequence[Timed]], tuple[TimedFinding, ...]],
    processes: int,
) -> tuple[TimedFinding, ...]:
    """Return what all processes found, or the first in which a build is not timed."""
    calm: list[tuple[TimedFinding, ...]] = []
    disturbed: list[tuple[TimedFinding, ...]] = []
    for process in range(_TRIES_OF_EACH * processes):
        found = time_in(process, builds)
        measured = [one.measurement for one in found if one.measurement]
        if len(measured) < len(found):
            return found
        is_disturbed = any(why_interfered(one.interference) is not None for one in measured)
        (disturbed if is_disturbed else calm).append(found)
        if len(calm) == processes:
            break
    kept = [*calm, *disturbed][:processes]
    middle, measurements = of_several_processes(
        [[one.measurement for one in found if one.measurement] for found in kept]
    )
    return tuple(
        replace(one, measurements=(measured,))
        for one, measured in zip(kept[middle], measurements, strict=True)
    )
