"""A kernel library as a runner: bench/native/timer.c calls it in a loop."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from gemm_tuner.abi import ArgsStruct, ArrayView, KernelLibrary, make_args
from gemm_tuner.arrays.weights import check_weights
from gemm_tuner.bench.c_runner import CRunner
from gemm_tuner.bench.drivers import WeightsStruct
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.errors import KernelRejected
from gemm_tuner.machine.memory import address_of

_REFUSED = -2


class _KernelCallsStruct(ctypes.Structure):
    """`kernel_calls` of bench/native/timer.c."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("args", ArgsStruct),
        ("phases", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class KernelRunner(CRunner):
    """A kernel that runs in some parts, on at most the threads of the workload.

    They are those it prefers, in which it was proved, if nothing else is said.
    """

    def __init__(
        self, library: KernelLibrary, workload: Workload, timer: Path, *, parts: int | None = None
    ) -> None:
        """Prepare the arguments of all calls."""
        parts = parts or library.preferred_parts
        self.parts = parts
        self.phases = library.phases
        self._library = library
        self._workload = workload
        self._workspace = workload.placement.allocate(library.workspace_bytes(parts))
        calls = _KernelCallsStruct(
            library.run_address,
            self._make_args(),
            library.phases,
            parts,
            workload.threads,
        )
        driver = ctypes.CDLL(str(timer))
        super().__init__(driver.bench_time_kernel, ctypes.byref(calls))
        self._time_parts = driver.bench_time_parts

    @property
    def packed_weight_bytes(self) -> int:
        """Return the size of the packed weights, in bytes."""
        return self._library.packed_weight_bytes

    def pack(self, address: int) -> None:
        """Pack the weights of the workload, if it has some, into the memory at `address`."""
        workload = self._workload
        if not workload.problem.operation.packs_ahead:
            return
        weights = check_weights(workload.problem, workload.w, workload.scales, workload.zero_points)
        self._library.pack_weights(weights.struct, address)

    def time_parts(
        self, weights: WeightsStruct, parts: Sequence[int], *, phase: int, calls: int
    ) -> list[float]:
        """Return the ns of each of some parts of one phase, which run in turn on this core."""
        elapsed = (ctypes.c_int64 * len(parts))()
        status = self._time_parts(
            self._layer,
            ctypes.byref(weights),
            ctypes.c_int32(phase),
            (ctypes.c_int32 * len(parts))(*parts),
            ctypes.c_int64(len(parts)),
            ctypes.c_int64(calls),
            elapsed,
        )
        self._check_calls(status)
        return [elapsed_ns / calls for elapsed_ns in elapsed]

    def _check_calls(self, status: int) -> None:
        if status == _REFUSED:
            raise KernelRejected(
                f"the kernel refused a call for {self._workload.problem.text}: it cannot be timed; "
                "build or fetch it again."
            )

    def _make_args(self) -> ArgsStruct:
        workload = self._workload
        n = max(1, workload.problem.n)
        leading_dimensions = {
            operand.name: n if operand.shape is OperandShape.MATRIX else 0
            for operand in workload.problem.epilogue.operands
        }
        return make_args(
            m=workload.rows,
            x=ArrayView(address_of(workload.x), max(1, workload.problem.k)),
            w=ArrayView(address_of(workload.w), max(1, workload.w.shape[1])),
            v=None if workload.v is None else ArrayView(address_of(workload.v), workload.problem.k),
            n=workload.problem.n,
            y=ArrayView(address_of(workload.y), max(1, workload.problem.y_columns)),
            operands=[
                ArrayView(address_of(array), leading_dimensions[name])
                for name, array in workload.operands.items()
            ],
            workspace=address_of(self._workspace),
        )
