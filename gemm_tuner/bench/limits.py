"""The limits of a plausible measurement: the least time of a call, and a generous longest one.

The margins are wide: what lies outside is not a fast kernel or a slow library, but a timing or a
baseline that nobody should be shown.
"""

from gemm_tuner.bench.roofline import footprint_bytes
from gemm_tuner.domain.cpu import WHOLE_SUMS_OF_BYTES, IsaFeature
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem

# A ratio above this is looked at closely.
LARGE_RATIO = 3.0

# The loop of multiply-adds may be slowed while it is timed; published kernels reach 101 % of it.
_ARITHMETIC_MARGIN = 1.25
# A kernel that prefetches or reads several streams is faster than the plain loop: up to 131 % in
# published tables. Of several threads, each has caches of its own.
_READING_MARGIN = 2.0
_READING_MARGIN_OF_THREADS = 4.0
_CALL_OF_LOOP_NS = 20.0

# How a simple loop in C computes an epilogue: for one element and step, and from memory.
_STEP_NS = 1.0
_POLYNOMIAL_NS = 10.0
_CONSTANTS_OF_POLYNOMIAL = 8  # at least; a minimum or a slope has one or two
_BYTES_PER_NS = 4.0


def least_arithmetic_ns(problem: Problem, peak_ns: float, isa: frozenset[IsaFeature]) -> float:
    """Return the least time of a call whose arithmetic takes `peak_ns` in the loop of the roofline.

    Some kernels multiply with an instruction that does more than the one of the loop.
    """
    return peak_ns / _ARITHMETIC_MARGIN / _instruction_over_loop(problem, isa)


def least_reading_ns(read_ns: float, *, threads: int) -> float:
    """Return the least time of a call whose reading takes one core `read_ns` in the plain loop."""
    margin = _READING_MARGIN if threads == 1 else threads * _READING_MARGIN_OF_THREADS
    return max(0.0, read_ns / margin - _CALL_OF_LOOP_NS)


def generous_epilogue_ns(problem: Problem, rows: int) -> float:
    """Return how long a simple loop over y takes for the epilogue, on one core."""
    of_element_ns = sum(
        _POLYNOMIAL_NS if step.kind.registers >= _CONSTANTS_OF_POLYNOMIAL else _STEP_NS
        for step in problem.epilogue.steps
    )
    elements = rows * problem.n
    y_bytes = elements * problem.types.y.size_bytes
    other_bytes = rows * problem.k * problem.types.x.size_bytes + problem.w_bytes
    operand_bytes = footprint_bytes(problem, rows) - other_bytes - y_bytes
    return elements * of_element_ns + (2 * y_bytes + operand_bytes) / _BYTES_PER_NS


def _instruction_over_loop(problem: Problem, isa: frozenset[IsaFeature]) -> float:
    """Return how many times as much the best instruction does as that of the loop."""
    types = problem.types
    if types.is_weight_only:
        return 4.0  # x in fixed point, products of bytes
    if types.x is DType.F16:
        return 16.0 if IsaFeature.AMX_FP16 in isa else 2.0
    if types.x in {DType.S8, DType.U8}:
        return 4.0 if not WHOLE_SUMS_OF_BYTES & isa else 1.0
    return 1.0
