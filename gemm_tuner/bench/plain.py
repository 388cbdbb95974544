"""What one would run instead of a kernel for quantised weights: floating-point weights.

Libraries differ in whether they have a fast path for quantised weights, and beside a slow one any
kernel looks good: docs/decisions/0012 says more.
"""

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.arrays.quantise import QuantisedWeights, dequantise_weights
from gemm_tuner.arrays.views import NUMPY_TYPES
from gemm_tuner.bench.baselines.baseline import Baseline
from gemm_tuner.bench.inputs import Inputs
from gemm_tuner.bench.workload import Runner, Workload, aligned_copy
from gemm_tuner.domain.dtype import OperandTypes
from gemm_tuner.domain.problem import Problem, WeightLayout


class PlainBaseline:
    """A baseline that computes a problem of quantised weights with floating-point ones."""

    def __init__(self, baseline: Baseline, problem: Problem, w: NDArray[Any]) -> None:
        """Wrap a baseline; `w` is what `plain_weights` returns for `problem`."""
        self._baseline = baseline
        self._w = w
        self.text = f"{baseline.text} with weights of {problem.types.x.value}"
        self.fuses_epilogue = baseline.fuses_epilogue
        self.most_weight_copies = baseline.most_weight_copies
        self.is_of_openmp = baseline.is_of_openmp
        self.preparation_s = baseline.preparation_s

    def prepare(self, workload: Workload) -> Runner:
        """Return a runner that works on `workload`, but for the weights.

        Raises:
            BaselineMissing: the library cannot compute the problem.
        """
        plain = replace(
            workload,
            problem=plain_problem(workload.problem),
            w=aligned_copy(self._w),
            scales=None,
            zero_points=None,
        )
        return self._baseline.prepare(plain)


def plain_problem(problem: Problem) -> Problem:
    """Return the problem with weights of the type of x, or itself if they are not quantised."""
    types = problem.types
    if not types.is_weight_only:
        return problem
    plain_types = OperandTypes(x=types.x, w=types.x, accumulator=types.accumulator, y=types.y)
    return replace(problem, types=plain_types, w_group=None)


def plain_weights(problem: Problem, inputs: Inputs) -> NDArray[Any]:
    """Return the quantised weights of `problem` as numbers, rounded to the type of x."""
    assert inputs.scales is not None
    weights = QuantisedWeights(inputs.w, inputs.scales, inputs.zero_points)
    w = dequantise_weights(problem, weights).astype(NUMPY_TYPES[problem.types.x])
    return w if problem.w_layout is WeightLayout.NK else w.T.copy()
