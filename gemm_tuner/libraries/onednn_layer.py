"""A linear layer computed by oneDNN, its epilogue fused if oneDNN has all of its steps."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gemm_tuner.arrays.views import NUMPY_TYPES
from gemm_tuner.arrays.weights import StoredWeights
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import NO_EPILOGUE, OperandShape
from gemm_tuner.domain.problem import Problem, WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.numpy_layer import Array, finish, takes_offset
from gemm_tuner.libraries.onednn import open_onednn
from gemm_tuner.libraries.onednn_matmul import OneDnnMatmul
from gemm_tuner.machine.memory import address_of, allocate_aligned

_SUM = np.dtype(np.float64)


class OneDnnLayer:
    """One problem, computed by oneDNN; any number of threads may call it at the same time.

    Where oneDNN cannot fuse the epilogue, it computes the sums, and NumPy the rest. The packed
    weights are then followed by the sums of their columns, if the epilogue needs them.
    """

    def __init__(self, problem: Problem, threads: int | None) -> None:
        """Prepare the greatest number of rows.

        `threads` are those of most calls, or None for as many as OpenMP has by default.

        Raises:
            BaselineMissing: oneDNN cannot be loaded, or has nothing fast for the problem.
        """
        library = open_onednn()
        self.text = library.text
        self._problem = problem
        self._is_fused = True
        try:
            self._matmul = OneDnnMatmul(library, problem, threads)
        except BaselineMissing:
            self._is_fused = False
            self._matmul = OneDnnMatmul(library, _sums_of(problem), threads)
        self._sums_bytes = (
            problem.n * _SUM.itemsize if takes_offset(problem) and not self._is_fused else 0
        )

    def pack(self, weights: StoredWeights) -> Array:
        """Return the weights in the layout that oneDNN wants, as bytes."""
        is_nk = self._problem.w_layout is WeightLayout.NK
        columns = np.ascontiguousarray(weights.w)
        size_bytes = self._matmul.packed_weight_bytes
        packed = allocate_aligned(size_bytes + self._sums_bytes)
        self._matmul.pack(address_of(columns), address_of(packed))
        if self._sums_bytes:
            packed[size_bytes:].view(_SUM)[...] = columns.sum(axis=int(is_nk), dtype=_SUM)
        return packed

    def compute(
        self,
        x: Array,
        packed: Array,
        y: Array,
        operands: Sequence[Array],
        threads: int | None,
    ) -> None:
        """Write `epilogue(x @ w)` to y; the operands are in the order of the epilogue.

        Rows that do not follow each other directly are copied: oneDNN has nothing fast for them.
        """
        if len(x) == 0:
            return
        target = y
        if not (self._is_fused and y.flags.c_contiguous):
            target = np.empty(y.shape, NUMPY_TYPES[self._matmul.y_type])
        fused = self._fused_operands(operands, y.shape) if self._is_fused else []
        self._matmul.compute(np.ascontiguousarray(x), packed, target, fused, threads)
        if self._is_fused:
            if target is not y:
                y[...] = target
            return
        sums = packed[-self._sums_bytes :].view(_SUM) if self._sums_bytes else None
        y[...] = finish(self._problem, target, sums, operands)

    def _fused_operands(self, operands: Sequence[Array], shape: tuple[int, ...]) -> list[Array]:
        return [
            np.ascontiguousarray(
                np.broadcast_to(array[:, np.newaxis], shape)
                if operand.shape is OperandShape.COLUMN_VECTOR
                else array
            )
            for operand, array in zip(self._problem.epilogue.operands, operands, strict=True)
        ]


def _sums_of(problem: Problem) -> Problem:
    """Return the problem without its epilogue, with y of the type in which oneDNN adds up."""
    y = DType.S32 if problem.types.x.is_integer else DType.F32
    return replace(problem, types=replace(problem.types, y=y), epilogue=NO_EPILOGUE)
