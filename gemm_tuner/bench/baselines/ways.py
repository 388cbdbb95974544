"""Baselines that can be asked for the same in several ways: the fastest is chosen once."""

from collections.abc import Callable, Mapping
from math import inf
from time import perf_counter

from gemm_tuner.bench.baselines.baseline import AnyBaseline
from gemm_tuner.bench.one_thread import may_need_one_thread
from gemm_tuner.bench.workload import Workload
from gemm_tuner.libraries.onednn_layer import pick_fastest

Call = Callable[[], object]

_RUN_S = 0.002  # of calls in a row


class BaselineOfWays(AnyBaseline):
    """A library whose users would take the fastest of several ways to call it."""

    fuses_epilogue = True
    preparation_s = 60.0

    def __init__(self) -> None:
        # The name of what was chosen, by the text of the problem and the threads.
        self._chosen: dict[str, str] = {}

    @property
    def choice(self) -> Mapping[str, str]:
        """Return the name of the way that was chosen for each problem and number of threads."""
        return self._chosen

    def settle(self, choice: Mapping[str, str]) -> None:
        """Call in these ways from now on."""
        self._chosen = dict(choice)

    def fastest(self, workload: Workload, ways: Mapping[str, Callable[[], Call]]) -> Call:
        """Return the call that takes the least time, or was chosen before; its name is told.

        Each way makes its call.
        """
        key = f"{workload.problem.text} on {workload.threads}"
        wanted = self._chosen.get(key)
        calls = {name: make() for name, make in ways.items() if wanted in {None, name}}
        names = list(calls)
        number = pick_fastest([_timed(call) for call in calls.values()]) if names[1:] else 0
        self._chosen[key] = self.implementation = names[number]
        return calls[names[number]]


def threads_to_try(workload: Workload) -> tuple[int, ...]:
    """Return the threads that are asked for, and one where that may be faster."""
    if may_need_one_thread(workload.problem, workload.threads):
        return workload.threads, 1
    return (workload.threads,)


def told_threads(name: str, workload: Workload, threads: int) -> str:
    """Return the name of a way with its number of threads, if that is not the one asked for."""
    return name if threads == workload.threads else f"{name}, on {threads} thread"


def _timed(call: Call) -> Callable[[], float]:
    def run() -> float:
        end_s = perf_counter() + _RUN_S
        least_s = inf
        while (begin_s := perf_counter()) < end_s:
            call()
            least_s = min(least_s, perf_counter() - begin_s)
        return least_s

    return run
