"""A linear layer computed by the OpenBLAS of NumPy, and passes in C for what it lacks."""

from collections.abc import Sequence

import numpy as np

from gemm_tuner.arrays.weights import StoredWeights
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.finish import (
    Array,
    Finish,
    Operation,
    built_finish,
    has_operation,
    operations_of,
)
from gemm_tuner.libraries.openblas import open_openblas
from gemm_tuner.libraries.openmp import OpenMp, system_openmp
from gemm_tuner.libraries.plain import plain_of_stored, plain_problem, text_with_plain_weights


class OpenBlasLayer:
    """One problem of floating-point numbers, its product in float32.

    Other types of x are converted by a pass before the product, w once, and another pass does the
    epilogue, as in the baseline that kernels are timed beside.
    """

    def __init__(self, problem: Problem) -> None:
        """Look for what computes it.

        Raises:
            BaselineMissing: NumPy has no OpenBLAS, the problem is of integers or without elements,
                or needs a pass that was not built.
        """
        if 0 in {problem.m.high, problem.n, problem.k}:
            raise BaselineMissing(f"{problem.text} has no elements.")
        self._given = problem
        self._problem = plain = plain_problem(problem)
        if plain.types.x.is_integer or plain.types.w.is_integer:
            raise BaselineMissing(f"OpenBLAS does not compute {plain.types.text}.")
        self._library = open_openblas()
        # Made here: it tells a forked child by what process it was made.
        self.openmp: OpenMp = system_openmp()
        self._pass = built_finish()
        converts_x = plain.types.x is not DType.F32
        self._finishes = bool(plain.epilogue.steps) or plain.types.y is not DType.F32
        has_passes = converts_x or self._finishes
        if has_passes and self._pass is None:
            raise BaselineMissing("the pass in C that OpenBLAS needs was not built.")
        for step in plain.epilogue.steps:
            if not has_operation(step):
                raise BaselineMissing(
                    f"no pass in C does the step {step.text!r}: {step.kind.left_to_numpy}."
                )
        # OpenBLAS is up to 1.7 times as fast with w as (k, n), but for a single row of x.
        self._wanted = WeightLayout.NK if plain.m.high == 1 else WeightLayout.KN
        if not problem.operation.packs_ahead:
            self._wanted = problem.w_layout
        name = f"{self._library.text} + pass" if has_passes else self._library.text
        self.text = text_with_plain_weights(name, problem)

    @property
    def layout(self) -> str:
        """Return how the weights are packed."""
        return f"{self.text} {self._wanted.value}"

    def pack(self, weights: StoredWeights) -> Array:
        """Return a copy of the weights in float32, (k, n), or (n, k) for a single row of x."""
        w = plain_of_stored(self._given, weights)
        is_as_wanted = self._problem.w_layout is self._wanted
        return np.array(w if is_as_wanted else w.T, np.float32, order="C")

    def compute(
        self, x: Array, packed: Array, y: Array, operands: Sequence[Array], threads: int | None
    ) -> None:
        """Write `epilogue(x @ w)` to y; the operands are in the order of the epilogue."""
        if not len(x):
            return
        sums = y if y.dtype == np.float32 else np.empty(y.shape, np.float32)
        with self._library.in_threads(threads) as used:
            x, w = (self._in_float32(one, used) for one in (x, packed))
            w = w.T if self._wanted is WeightLayout.NK else w
            # A kernel computes with infinities in silence, and so does its substitute.
            with np.errstate(all="ignore"):
                np.matmul(x, w, out=sums)
        if self._finishes:
            self._run(operations_of(self._problem.epilogue.steps, operands), sums, y, used)

    def _in_float32(self, array: Array, threads: int) -> Array:
        """Return an array as it is multiplied: of other types of x, and of w in the call."""
        if array.dtype == np.float32:
            return array
        converted = np.empty(array.shape, np.float32)
        self._run([], array, converted, threads)
        return converted

    def _run(
        self, operations: Sequence[Operation], source: Array, target: Array, threads: int
    ) -> None:
        assert self._pass is not None
        if threads == 1:
            Finish(operations, source, target).run(self._pass)
            return
        with self.openmp.in_threads(threads) as usable:
            one = Finish(operations, source, target, team=self.openmp.team(usable or threads))
            one.run(self._pass)
