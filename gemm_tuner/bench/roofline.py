"""The limits of one core: multiply-adds, and reads of all that a call must touch."""

import ctypes
from collections.abc import Callable
from pathlib import Path

from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.measurement import Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.memory import address_of, allocate_aligned

_ROUNDS_PER_CALL = 1000
_CALLS_PER_SAMPLE = 1000  # of a roofline: whole ns are too coarse for one call


class PeakLoop:
    """A loop of independent multiply-adds on one core, to be timed like a kernel."""

    packs_each_copy = False
    packed_weight_bytes = 0

    def __init__(self, driver: Path, dtype: DType) -> None:
        """Load the driver, bench/native/roofline.c, for products of `dtype`."""
        library = ctypes.CDLL(str(driver))
        loops = {
            DType.BF16: library.roofline_multiply_add_bf16,
            DType.S8: library.roofline_multiply_add_int8,
            DType.U8: library.roofline_multiply_add_int8,
        }
        self._multiply_add = loops.get(dtype, library.roofline_multiply_add)
        self._multiply_add.restype = ctypes.c_int64
        self.flop_per_call: int = self._run(1)[0]

    def pack(self, address: int) -> None:
        """Do nothing: there are no weights."""

    def sample(
        self, _weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        """Return the time of `timed_calls` calls after some that do not count."""
        self._run(warm_up_calls)
        return self._run(timed_calls)[1]

    def _run(self, calls: int) -> tuple[int, SampleStruct]:
        sample = SampleStruct()
        rounds = ctypes.c_int64(calls * _ROUNDS_PER_CALL)
        flop: int = self._multiply_add(rounds, ctypes.byref(sample))
        return flop, sample


class ReadLoop:
    """A loop on one core that reads as many bytes as a call must touch, to be timed like a kernel.

    Its weights are as hot or as cold as those of a kernel; all else stays warm. It reads in one
    stream, and unless it `is_plain` in eight side by side too: a sample is of the faster.
    """

    packs_each_copy = False

    def __init__(
        self, driver: Path, problem: Problem, rows: int, *, is_plain: bool = False
    ) -> None:
        """Load the driver, bench/native/roofline.c, and make memory for all but the weights."""
        loaded = ctypes.CDLL(str(driver))
        self._reads = [loaded.roofline_read]
        if not is_plain:
            self._reads.append(loaded.roofline_read_in_streams)
        self.packed_weight_bytes = problem.w_bytes
        self._others = allocate_aligned(footprint_bytes(problem, rows) - problem.w_bytes)
        self._others[:] = 0

    def pack(self, address: int) -> None:
        """Write zeros: the values do not matter, but the pages must exist."""
        ctypes.memset(address, 0, self.packed_weight_bytes)

    def sample(
        self, weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        """Return the time of `timed_calls` calls after some that do not count."""
        self._run(self._reads[0], weights, warm_up_calls)
        samples = (self._run(read, weights, timed_calls) for read in self._reads)
        return min(samples, key=lambda one: int(one.elapsed_ns))

    def _run(self, read: Callable[..., None], weights: WeightsStruct, calls: int) -> SampleStruct:
        sample = SampleStruct()
        read(
            ctypes.byref(weights),
            ctypes.c_int64(self.packed_weight_bytes),
            ctypes.c_void_p(address_of(self._others)),
            ctypes.c_int64(self._others.nbytes),
            ctypes.c_int64(calls),
            ctypes.byref(sample),
        )
        return sample


def footprint_bytes(problem: Problem, rows: int) -> int:
    """Return how many bytes a call must touch: x, w, v, y and what steps read, each once.

    What is added to hidden scores is not read.
    """
    elements = {
        OperandShape.SCALAR: 1,
        OperandShape.ROW_VECTOR: problem.n,
        OperandShape.COLUMN_VECTOR: rows,
        OperandShape.MATRIX: problem.seen(rows),
    }
    operand_bytes = sum(
        elements[operand.shape] * problem.operand_type(operand).size_bytes
        for operand in problem.epilogue.operands
    )
    types = problem.types
    matrices_like_w = 2 if problem.operation.has_values else 1
    return (
        rows * problem.k * types.x.size_bytes
        + matrices_like_w * problem.w_bytes
        + rows * problem.y_columns * types.y.size_bytes
        + operand_bytes
    )


def roofline_timing(
    problem: Problem, rows: int, *, peak: Timing, flop_per_peak_call: int, read: Timing, cores: int
) -> Timing:
    """Return the least time of a call: the longer of arithmetic and reading, in each round.

    `peak` and `read` are of one core; no call is faster than `cores` times that.

    Source: Williams, Waterman and Patterson, Roofline, Communications of the ACM 52(4), 2009.
    """
    peak_calls = problem.flop(rows) / flop_per_peak_call
    is_arithmetic = peak_calls * peak.median_ns > read.median_ns
    limit, calls = (peak, peak_calls) if is_arithmetic else (read, 1)
    scale = _CALLS_PER_SAMPLE * calls / limit.calls_per_sample / cores
    return Timing(
        calls_per_sample=_CALLS_PER_SAMPLE,
        samples_ns=tuple(max(1, round(scale * sample_ns)) for sample_ns in limit.samples_ns),
    )
