"""A library on one thread, where several are asked for: the faster of both is what a user runs."""

import ctypes
import os

from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct
from gemm_tuner.bench.workload import Runner
from gemm_tuner.domain.problem import Problem

# A call that takes more than about 0.2 ms on one core gains by a second, whatever it costs to wake.
_MOST_FLOP = 2e7


def may_need_one_thread(problem: Problem, threads: int) -> bool:
    """Return whether a library may compute a problem faster on one thread than on `threads`."""
    return threads > 1 and problem.flop(problem.m.high) <= _MOST_FLOP


class OneThreadForm:
    """A runner of a library that takes its threads from OpenMP, called on one."""

    def __init__(self, runner: Runner, threads: int) -> None:
        """Wrap a runner that was prepared for one thread, in a process that has `threads`."""
        self._runner = runner
        self._threads = threads
        self.pack = runner.pack
        self.packs_each_copy = runner.packs_each_copy

    @property
    def packed_weight_bytes(self) -> int:
        """Return the size of the packed weights, in bytes."""
        return self._runner.packed_weight_bytes

    def sample(
        self, weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        """Return the time of `timed_calls` calls after some that do not count."""
        set_openmp_threads(1)
        try:
            return self._runner.sample(
                weights, warm_up_calls=warm_up_calls, timed_calls=timed_calls
            )
        finally:
            set_openmp_threads(self._threads)


def set_openmp_threads(threads: int) -> bool:
    """Let parallel regions of GNU OpenMP use so many threads; return whether it is loaded."""
    try:
        openmp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    openmp.omp_set_num_threads(ctypes.c_int(threads))
    return True
