"""Floating-point weights, which run instead of a kernel for quantised ones."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.bench.baselines.baseline import Baseline
from gemm_tuner.bench.inputs import Inputs
from gemm_tuner.bench.workload import Runner, Workload, aligned_copy
from gemm_tuner.domain.problem import Problem
from gemm_tuner.libraries.plain import plain_problem, text_with_plain_weights


class PlainBaseline:
    """A baseline that computes a problem of quantised weights with floating-point ones."""

    def __init__(self, baseline: Baseline, problem: Problem, w: NDArray[Any]) -> None:
        """Wrap a baseline; `w` is what `plain_weights` returns for `problem`."""
        self._baseline = baseline
        self._given = problem
        self._w = w
        self.fuses_epilogue = baseline.fuses_epilogue
        self.most_weight_copies = baseline.most_weight_copies
        self.is_of_openmp = baseline.is_of_openmp
        self.preparation_s = baseline.preparation_s
        self.starts_programs = baseline.starts_programs

    @property
    def text(self) -> str:
        """Return the name of the library, and what weights it has."""
        return text_with_plain_weights(self._baseline.text, self._given)

    @property
    def implementation(self) -> str:
        """Return by what the library computes."""
        return self._baseline.implementation

    def computed(self, problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
        """Return the problem with floating-point weights, rounded as the library gets them."""
        return plain_problem(problem), replace(inputs, w=self._w, scales=None, zero_points=None)

    @property
    def choice(self) -> Mapping[str, str]:
        """Return what the library chose."""
        return self._baseline.choice

    def settle(self, choice: Mapping[str, str]) -> None:
        """Let the library compute so from now on."""
        self._baseline.settle(choice)

    def preload(self) -> None:
        """Load the library."""
        self._baseline.preload()

    def check_problem(self, problem: Problem) -> None:
        """Refuse what the library does not compute with such weights."""
        self._baseline.check_problem(plain_problem(problem))

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
