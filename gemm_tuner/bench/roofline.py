"""What this CPU can do at most: multiply-adds on one core, and reads of a block of memory."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct
from gemm_tuner.bench.regimes import cold_footprint_bytes
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem
from gemm_tuner.runtime.memory import address_of, allocate_aligned

_ROUNDS_PER_CALL = 1000
_READ_SAMPLE_NS = 20_000_000
_READ_SAMPLES = 5
_READ_UNIT_BYTES = 512  # eight of the widest vectors


class PeakLoop:
    """A loop of independent multiply-adds on one core, to be timed like a kernel."""

    packed_weight_bytes = 0

    def __init__(self, driver: Path, dtype: DType) -> None:
        """Load the driver, templates/bench/roofline.c, for products of `dtype`."""
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


def measure_read_bytes_per_s(driver: Path, footprint_bytes: int) -> float:
    """Return how fast one core reads a block of this size again and again, at its best."""
    read = ctypes.CDLL(str(driver)).roofline_read
    size_bytes = max(1, footprint_bytes // _READ_UNIT_BYTES) * _READ_UNIT_BYTES
    memory = allocate_aligned(size_bytes)
    memory[:] = 0

    def elapsed_ns(rounds: int) -> int:
        sample = SampleStruct()
        read(
            ctypes.c_void_p(address_of(memory)),
            ctypes.c_int64(size_bytes),
            ctypes.c_int64(rounds),
            ctypes.byref(sample),
        )
        return max(1, int(sample.elapsed_ns))

    elapsed_ns(1)
    rounds = max(1, _READ_SAMPLE_NS // elapsed_ns(1))
    fastest_ns = min(elapsed_ns(rounds) for _sample in range(_READ_SAMPLES))
    return 1e9 * rounds * size_bytes / fastest_ns


def footprint_bytes(problem: Problem, rows: int) -> int:
    """Return how many bytes a call must touch: x, w, y and what the epilogue reads, each once."""
    elements = {
        OperandShape.SCALAR: 1,
        OperandShape.ROW_VECTOR: problem.n,
        OperandShape.COLUMN_VECTOR: rows,
        OperandShape.MATRIX: rows * problem.n,
    }
    operand_bytes = sum(
        elements[operand.shape] * problem.operand_type(operand).size_bytes
        for operand in problem.epilogue.operands
    )
    types = problem.types
    return (
        rows * problem.k * types.x.size_bytes
        + problem.w_bytes
        + rows * problem.n * types.y.size_bytes
        + operand_bytes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRates:
    """How fast the weights are read, and all else that a call touches, in bytes per second."""

    weights: float
    others: float


def measure_read_rates(
    driver: Path, problem: Problem, rows: int, *, regime: Regime, l3_bytes: int
) -> ReadRates:
    """Return how fast one core reads what a call touches, from where its regime leaves it.

    Cold weights come from memory. The others stay warm: in a block of their own size.
    """
    touched_bytes = footprint_bytes(problem, rows)
    if regime is Regime.HOT:
        rate = measure_read_bytes_per_s(driver, touched_bytes)
        return ReadRates(weights=rate, others=rate)
    return ReadRates(
        weights=measure_read_bytes_per_s(driver, cold_footprint_bytes(l3_bytes)),
        others=measure_read_bytes_per_s(driver, touched_bytes - problem.w_bytes),
    )


def roofline_ns(
    problem: Problem, rows: int, *, peak_flop_per_s: float, read_rates: ReadRates, cores: int
) -> float:
    """Return the time below which no call can be, in ns: the longer of arithmetic and reading.

    The rates are those of one core; no call is faster than `cores` times that.

    Source: Williams, Waterman and Patterson, Roofline, Communications of the ACM 52(4), 2009.
    """
    compute_s = problem.flop(rows) / peak_flop_per_s
    other_bytes = footprint_bytes(problem, rows) - problem.w_bytes
    memory_s = problem.w_bytes / read_rates.weights + other_bytes / read_rates.others
    return 1e9 * max(compute_s, memory_s) / cores
