"""Runners whose calls are a loop in C, in a driver of bench/native."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct
from gemm_tuner.machine.memory import address_of


class CRunner:
    """A layer, given as the driver takes it: a pointer; `loop` is the function that times it."""

    packs_each_copy = False

    def __init__(self, loop: Callable[..., int], layer: object) -> None:
        self._loop = loop
        self._layer = layer

    def sample(
        self, weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        """Return the time of `timed_calls` calls after some that do not count."""
        sample = SampleStruct()
        status = self._loop(
            self._layer,
            ctypes.byref(weights),
            ctypes.c_int64(warm_up_calls),
            ctypes.c_int64(timed_calls),
            ctypes.byref(sample),
        )
        self._check_calls(status)
        return sample

    def _check_calls(self, status: int) -> None:
        """Do nothing: not every loop returns a status."""


class CRunnerOfArray(CRunner):
    """A layer whose library takes the weights as an array, `w`; None where the layer has them."""

    def __init__(self, loop: Callable[..., int], layer: object, w: NDArray[Any] | None) -> None:
        super().__init__(loop, layer)
        self._w = np.empty(0) if w is None else w

    @property
    def packed_weight_bytes(self) -> int:
        """Return the size of the weights, in bytes."""
        return self._w.nbytes

    def pack(self, address: int) -> None:
        """Copy the weights to `address`."""
        ctypes.memmove(address, address_of(self._w), self._w.nbytes)
