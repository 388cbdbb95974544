"""Make the inputs of a problem: x, w and what the epilogue reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem, WeightLayout
from gemm_tuner.runtime.arrays import NUMPY_TYPES

# Elements of the problem's types; NumPy's own types do not include bfloat16.
Array = NDArray[Any]

_SUBNORMAL = 1e-40
# Instructions for bfloat16 take subnormal numbers for zero, and infinity times zero is NaN: there,
# subnormals stand apart from infinities, among the normal numbers.
_SPECIAL_VALUES = {
    DType.F32: (np.nan, np.inf, -np.inf, _SUBNORMAL),
    DType.BF16: (np.nan, np.inf, -np.inf),
}


class InputKind(StrEnum):
    """What the elements of x and w are."""

    NORMAL = "normal"  # random, normally distributed, with a few subnormal numbers
    EXACT = "exact"  # small integers times a power of two: any order of summation is exact
    SPECIAL = "special"  # as EXACT, with NaN, infinities and subnormal numbers among them


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a call reads. All arrays are contiguous and have the types of the problem.

    x: (m, k). w: as the problem's layout says. operands: by name; a scalar has the shape (1,).
    """

    kind: InputKind
    x: Array
    w: Array
    operands: dict[str, Array]

    @property
    def product_is_exact(self) -> bool:
        """Say whether x @ w has no rounding error, whatever the order of summation."""
        return self.kind is not InputKind.NORMAL

    def first_rows(self, rows: int) -> "Inputs":
        """Return the inputs of a call with fewer rows."""
        return replace(
            self,
            x=self.x[:rows],
            operands={
                name: operand[:rows] if operand.ndim == 2 else operand
                for name, operand in self.operands.items()
            },
        )


def make_inputs(problem: Problem, kind: InputKind, seed: int) -> Inputs:
    """Return inputs for the largest number of rows, the same for the same seed.

    Elements of w are of the size 1 / sqrt(k), so that products are where epilogues bend.
    """
    random = np.random.default_rng(seed)
    rows, n, k = problem.m.high, problem.n, problem.k
    exponent = -round(np.log2(max(k, 1)) / 2)
    x = _elements(random, (rows, k), kind)
    x = x.astype(NUMPY_TYPES[problem.types.x])
    # Row j of w belongs to column j of the result.
    w = _elements(random, (n, k), kind) * np.float32(2.0**exponent)
    w = w.astype(NUMPY_TYPES[problem.types.w])
    operands = {
        operand.name: random.standard_normal(
            _operand_shape(operand.shape, rows, n), dtype=np.float32
        ).astype(_operand_type(operand.shape, problem))
        for operand in problem.epilogue.operands
    }
    if kind is InputKind.SPECIAL:
        _plant_in_rows(random, x, _SPECIAL_VALUES[problem.types.x])
        _plant_in_rows(random, w, _SPECIAL_VALUES[problem.types.w])
        for operand in operands.values():
            _plant(random, operand, _SPECIAL_VALUES[problem.types.y])
    if kind is InputKind.NORMAL:
        _plant_in_rows(random, x, (_SUBNORMAL,))
        _plant_in_rows(random, w, (_SUBNORMAL,))
    return Inputs(
        kind=kind,
        x=x,
        w=w if problem.w_layout is WeightLayout.NK else np.ascontiguousarray(w.T),
        operands=operands,
    )


def _elements(random: np.random.Generator, shape: tuple[int, int], kind: InputKind) -> Array:
    if kind is InputKind.NORMAL:
        return random.standard_normal(shape, dtype=np.float32)
    return random.integers(-3, 4, shape, dtype=np.int8).astype(np.float32)


def _operand_type(shape: OperandShape, problem: Problem) -> np.dtype[np.generic]:
    is_scalar = shape is OperandShape.SCALAR
    return NUMPY_TYPES[problem.types.accumulator if is_scalar else problem.types.y]


def _operand_shape(shape: OperandShape, rows: int, n: int) -> tuple[int, ...]:
    shapes: dict[OperandShape, tuple[int, ...]] = {
        OperandShape.SCALAR: (1,),
        OperandShape.ROW_VECTOR: (n,),
        OperandShape.MATRIX: (rows, n),
    }
    return shapes[shape]


def _plant_in_rows(random: np.random.Generator, matrix: Array, values: Sequence[float]) -> None:
    """Plant one value in each of a few rows, and leave at least one row as it is."""
    rows, columns = matrix.shape
    if columns == 0:
        return
    count = max(0, min(len(values), rows - 1))
    for row, value in zip(
        random.choice(rows, count, replace=False) if count else (), values, strict=False
    ):
        matrix[row, random.integers(columns)] = value


def _plant(random: np.random.Generator, array: Array, values: Sequence[float]) -> None:
    flat = array.reshape(-1)
    count = max(0, min(len(values), flat.size - 1))
    if count:
        flat[random.choice(flat.size, count, replace=False)] = values[:count]
