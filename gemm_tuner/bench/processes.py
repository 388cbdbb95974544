"""Time a build in several processes: one alone says how fast it is there, not elsewhere."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gemm_tuner.bench.finding import TimedFinding
from gemm_tuner.domain.doubt import why_interfered
from gemm_tuner.domain.measurement import of_several_processes

_TRIES_OF_EACH = 2


def time_in_processes(time_in: Callable[[int], TimedFinding], processes: int) -> TimedFinding:
    """Return what several processes found of a build, with the measurement of all of them.

    `time_in` times it in the process of a number, from 0 on. What other work disturbed is timed
    once more in another process. The scheduler's counts ask for that, never the ratio, so it
    favours nobody. A process in which the build is not timed has the last word.
    """
    calm: list[TimedFinding] = []
    disturbed: list[TimedFinding] = []
    for process in range(_TRIES_OF_EACH * processes):
        found = time_in(process)
        if found.measurement is None:
            return found
        is_disturbed = why_interfered(found.measurement.interference) is not None
        (disturbed if is_disturbed else calm).append(found)
        if len(calm) == processes:
            break
    return _together([*calm, *disturbed][:processes])


def _together(found: Sequence[TimedFinding]) -> TimedFinding:
    """Return the finding of the process with the median ratio, with the rounds of the others."""
    measured = of_several_processes([one.measurement for one in found if one.measurement])
    of_one = replace(measured, repeats=())
    middle = next(one for one in found if one.measurement == of_one)
    return replace(middle, measurements=(measured,))
