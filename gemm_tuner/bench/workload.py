"""The buffers that a timing works on, the same for every runner, and what a runner is."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct
from gemm_tuner.bench.inputs import Inputs
from gemm_tuner.bench.placement import Placement
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.memory import allocate_aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A problem with the largest number of rows: dense, aligned arrays, large ones in huge pages.

    x: (m, k). w: as the problem's layout says, with scales and zero_points where it has them.
    y: (m, n), of attention (m, k), with values v (n, k). operands: by name. `placement` says where
    they and what runners allocate begin.
    """

    problem: Problem
    threads: int
    x: NDArray[Any]
    w: NDArray[Any]
    scales: NDArray[Any] | None
    zero_points: NDArray[Any] | None
    y: NDArray[Any]
    operands: dict[str, NDArray[Any]]
    v: NDArray[Any] | None = None
    placement: Placement = field(default_factory=Placement)

    @property
    def rows(self) -> int:
        """Return the number of rows of x and y."""
        return self.problem.m.high


class Runner(Protocol):
    """A kernel or a baseline that is ready to be timed on a workload.

    Where it `packs_each_copy`, packed weights depend on where they lie: no copy of them is right.
    """

    @property
    def packs_each_copy(self) -> bool:
        """Say whether weights must be packed again for each address."""

    @property
    def packed_weight_bytes(self) -> int:
        """Return the size of the weights in the runner's own layout, in bytes."""

    def pack(self, address: int) -> None:
        """Write the weights of the workload, in the runner's layout, to `address`."""

    def sample(
        self, weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        """Return the time of `timed_calls` calls after some that do not count."""


def make_workload(problem: Problem, inputs: Inputs, *, threads: int, process: int = 0) -> Workload:
    """Return a workload that holds copies of `inputs`, placed as in the process of this number."""
    placement = Placement(process)
    return Workload(
        problem=problem,
        threads=threads,
        x=placement.copy(inputs.x),
        w=placement.copy(inputs.w),
        scales=inputs.scales,
        zero_points=inputs.zero_points,
        y=placement.copy(
            np.zeros((problem.m.high, problem.y_columns), NUMPY_TYPES[problem.types.y])
        ),
        operands={name: placement.copy(array) for name, array in inputs.operands.items()},
        v=None if inputs.v is None else placement.copy(inputs.v),
        placement=placement,
    )


def aligned_copy(array: NDArray[Any]) -> NDArray[Any]:
    """Return a dense copy of an array, aligned, and in huge pages if it is large."""
    copy = allocate_aligned(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
