"""The roof of this machine for the linear layers of a model, measured in turn with its ways."""

from collections.abc import Sequence
from math import inf
from statistics import median

from gemm_tuner.bench.drivers import build_driver, widest_vectors
from gemm_tuner.bench.regimes import WeightCopies, cold_footprint_bytes
from gemm_tuner.bench.roofline import PeakLoop, ReadLoop, footprint_bytes
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.model_run import LayerCalls
from gemm_tuner.domain.problem import Problem
from gemm_tuner.models.calm import taken_calmly
from gemm_tuner.models.row import Precision

_ROW_BYTES = 1 << 14
# Of 2 us each. A core that has slept multiplies at half its rate for half a millisecond.
_WARM_UP_CALLS, _PEAK_CALLS = 5000, 2500


class Roof:
    """Arithmetic and reading of one core, for the layers of a model in one type of operands."""

    def __init__(self, cpu: Cpu, precision: Precision, layers: Sequence[LayerCalls]) -> None:
        """Build the loops, and make memory as large as the weights, or as much as is not cached.

        Raises:
            GemmTunerError: there is no compiler, or it fails.
        """
        operands = OperandTypes.parse(precision.types)
        self._problems = [(_problem(precision, one), one) for one in layers]
        driver = build_driver("roofline", find_toolchain(), "sample.h", isa=widest_vectors(cpu.isa))
        weights_bytes = sum(problem.w_bytes * one.calls for problem, one in self._problems)
        block_bytes = min(weights_bytes, cold_footprint_bytes(cpu.caches.l3_bytes))
        columns = _ROW_BYTES // DType.F32.size_bytes
        block = Problem.create(1, max(1, block_bytes // _ROW_BYTES), columns)
        self._peak, self._read = PeakLoop(driver, operands.x), ReadLoop(driver, block, 1)
        self._read_bytes = footprint_bytes(block, 1)
        self._copy = WeightCopies(self._read, 1, seed=0)
        self._peaks_ns: list[int] = []
        self._reads_ns: list[int] = []

    def sample(self) -> None:
        """Time both loops once."""
        for times_ns, take in ((self._peaks_ns, self._peak_ns), (self._reads_ns, self._read_ns)):
            times_ns.append(taken_calmly(take, float, min(times_ns, default=inf)))

    def _peak_ns(self) -> int:
        calls = {"warm_up_calls": _WARM_UP_CALLS, "timed_calls": _PEAK_CALLS}
        return max(1, int(self._peak.sample(self._copy.struct, **calls).elapsed_ns))

    def _read_ns(self) -> int:
        read = self._read.sample(self._copy.struct, warm_up_calls=1, timed_calls=1)
        return max(1, int(read.elapsed_ns))

    @property
    def flop_per_s(self) -> float:
        """Return the rate of multiply-adds of one core, each two operations."""
        return self._peak.flop_per_call * _PEAK_CALLS / median(self._peaks_ns) * 1e9

    @property
    def bytes_per_s(self) -> float:
        """Return the rate at which one core reads weights as a model does."""
        return self._read_bytes / median(self._reads_ns) * 1e9

    def layers_s(self, threads: int) -> float:
        """Return the least time of all layers in a call, in seconds.

        Source: Williams, Waterman and Patterson, Roofline, Communications of the ACM 52(4), 2009.
        """
        return sum(
            calls.calls
            * max(
                problem.flop(calls.m) / self.flop_per_s,
                footprint_bytes(problem, calls.m) / self.bytes_per_s,
            )
            / threads
            for problem, calls in self._problems
        )


def _problem(precision: Precision, layer: LayerCalls) -> Problem:
    layout = precision.w_layout(layer.n, layer.k)
    return Problem.create(
        *(layer.m, layer.n, layer.k),
        dtype=precision.other if layout is None else precision.types,
        epilogue="bias" if layer.has_bias else "none",
        w_layout=layout or "nk",
    )
