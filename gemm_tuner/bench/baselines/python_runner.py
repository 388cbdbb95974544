"""Time a library that is called from Python: the cost of that is part of what its users get."""

import ctypes
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct
from gemm_tuner.bench.workload import Workload
from gemm_tuner.machine.memory import address_of


class PythonRunner:
    """Calls without arguments, one for each copy of the weights.

    `make_call` is given a copy of w, which stays where it is, in the layout of the problem. It may
    pack it, and returns the call that computes y with it.
    """

    packs_each_copy = False

    def __init__(
        self, workload: Workload, make_call: Callable[[NDArray[Any]], Callable[[], object]]
    ) -> None:
        self._w = workload.w
        self._packs_ahead = workload.problem.operation.packs_ahead
        self._make_call = make_call
        self._calls: list[Callable[[], object]] = []

    @property
    def packed_weight_bytes(self) -> int:
        """Return the size of the weights, in bytes; an activation is not copied."""
        return self._w.nbytes if self._packs_ahead else 0

    def pack(self, address: int) -> None:
        """Copy the weights to `address`."""
        ctypes.memmove(address, address_of(self._w), self.packed_weight_bytes)

    def sample(
        self, weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        """Return the time of `timed_calls` calls after some that do not count."""
        if not self._calls:
            self._calls = [
                self._make_call(self._weights_at(weights.copies[copy]))
                for copy in range(weights.count)
            ]
        for call in self._next_calls(weights, warm_up_calls):
            call()
        calls = self._next_calls(weights, timed_calls)
        switches = _involuntary_switches()
        begin_ns = time.perf_counter_ns()
        for call in calls:
            call()
        elapsed_ns = time.perf_counter_ns() - begin_ns
        return SampleStruct(elapsed_ns, _involuntary_switches() - switches)

    def _next_calls(self, weights: WeightsStruct, count: int) -> list[Callable[[], object]]:
        first: int = weights.next
        weights.next = (first + count) % weights.count
        return [self._calls[turn % weights.count] for turn in range(first, first + count)]

    def _weights_at(self, address: int | None) -> NDArray[Any]:
        if not address or self.packed_weight_bytes == 0:
            return self._w
        memory = (ctypes.c_uint8 * self._w.nbytes).from_address(address)
        return np.ctypeslib.as_array(memory).view(self._w.dtype).reshape(self._w.shape)


def _involuntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
