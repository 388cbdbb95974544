"""Make the inputs of a problem: x, w and what the epilogue reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.quantise import store_elements
from gemm_tuner.bench.tolerance import results_of_products, rolled_columns, rotated_rows
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem

# Elements of the problem's types; NumPy's own types do not include bfloat16.
from gemm_tuner.domain.weight_layout import WeightLayout

# Elements of the problem's types; NumPy's own types do not include bfloat16.
Array = NDArray[Any]

_SUBNORMALS = {DType.F32: 1e-40, DType.BF16: 1e-40, DType.F16: 1e-6}
_SPECIAL_VALUES = {
    DType.F32: (np.nan, np.inf, -np.inf),
    DType.BF16: (np.nan, np.inf, -np.inf),
    DType.F16: (np.nan, np.inf, -np.inf),
    DType.S32: (),
    DType.S8: (-128, 127),
    DType.U8: (0, 255),
    DType.S4: (-8, 7),
    DType.U4: (0, 15),
}

# Of float16: the largest number, and the unit of small multiples that are subnormal.
_LARGEST_F16 = 65504.0
_SUBNORMAL_UNIT_F16 = 2.0**-22
# So many elements of an array are drawn, and then they come again: to draw the 256 million of 512 x
# 500000 takes seconds. The number is prime: no two rows or blocks of a kernel are alike.
_PERIOD = 4_194_301


class InputKind(StrEnum):
    """The kinds of elements of x and w."""

    # Floats normally distributed, in float16 with a few subnormal numbers; integers from all there
    # are. Calls are timed with them.
    NORMAL = "normal"
    # Small integers times a power of two: any order of summation is exact. In float32 and bfloat16
    # with a few subnormal numbers, which vanish in sums.
    EXACT = "exact"
    # As EXACT, with NaN, infinities and subnormal numbers, or extremes of integers, among them; in
    # float16 a row of x and one of w are subnormal.
    SPECIAL = "special"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of a call. All arrays are contiguous and have the types of the problem.

    x: (m, k). w: as the problem's layout says. scales, zero_points: (n, groups), where w has them.
    v: (n, k), where the problem has values. operands: by name; a scalar has the shape (1,).
    """

    kind: InputKind
    x: Array
    w: Array
    operands: dict[str, Array]
    row_operands: frozenset[str]  # have a row or an element for each row of x
    scales: Array | None = None
    zero_points: Array | None = None
    v: Array | None = None

    @property
    def product_is_exact(self) -> bool:
        """Say whether x @ w has no rounding error, whatever the order of summation."""
        return self.kind is not InputKind.NORMAL or self.x.dtype.kind in "iu"

    def of_products(self, problem: Problem, products: int) -> "Inputs":
        """Return the inputs of some products, those of each below those of the last.

        The rows of x lie one further in each product than in the last, the last one at the front.
        So do the columns of w, where it comes with each call. Of attention, the elements of
        queries, keys and values do instead: scores stay, and so does what causal hides.
        """
        if self.v is not None:
            return replace(
                self,
                x=rolled_columns(self.x, products),
                w=rolled_columns(self.w, products),
                v=rolled_columns(self.v, products),
                operands={
                    name: np.tile(array, (products, 1)) if name in self.row_operands else array
                    for name, array in self.operands.items()
                },
            )
        rotated = replace(
            self,
            x=rotated_rows(self.x, products),
            operands={
                name: rotated_rows(operand, products) if name in self.row_operands else operand
                for name, operand in self.operands.items()
            },
        )
        if problem.operation.packs_ahead or products == 1:
            return rotated
        operands = dict(rotated.operands)
        for operand in problem.epilogue.operands:
            array = self.operands[operand.name]
            if operand.shape is OperandShape.MATRIX:
                operands[operand.name] = results_of_products(array, problem, products)
            elif operand.shape is OperandShape.ROW_VECTOR:
                operands[operand.name] = rolled_columns(np.atleast_2d(array), products)
        across = 0 if problem.w_layout is WeightLayout.NK else 1
        w = np.concatenate([np.roll(self.w, one, axis=across) for one in range(products)])
        return replace(rotated, w=w, operands=operands)

    def first_keys(self, keys: int) -> "Inputs":
        """Return the inputs of a call of attention with fewer keys."""
        assert self.v is not None
        return replace(
            self,
            w=self.w[:keys],
            v=self.v[:keys],
            operands={
                name: operand[:, :keys] if name in self.row_operands else operand
                for name, operand in self.operands.items()
            },
        )

    def first_rows(self, rows: int) -> "Inputs":
        """Return the inputs of a call with fewer rows."""
        return replace(
            self,
            x=self.x[:rows],
            operands={
                name: operand[:rows] if name in self.row_operands else operand
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
    x = _elements(random, (rows, k), kind, problem.types.x)
    # Row j of w belongs to column j of the result.
    w_scale = 1.0 if problem.types.w.is_integer else 2.0**exponent
    w = _elements(random, (n, k), kind, problem.types.w, scale=w_scale)
    scales, zero_points = _make_groups(problem, kind, random, exponent)
    operands = _make_operands(problem, kind, random)
    v = _make_values(problem, kind, random)
    if kind is InputKind.SPECIAL:
        if problem.types.x is DType.F16 and problem.types.accumulator is DType.F32:
            _use_range_of_f16(random, x, w)
        # Weights with zero points do not promise what an infinity becomes.
        of_x = (np.nan,) if problem.has_zero_points else _special_values(problem, problem.types.x)
        _plant_in_rows(random, x, of_x)
        # One infinite key would make NaN of all rows.
        of_w = () if problem.operation.has_values else _special_values(problem, problem.types.w)
        _plant_in_rows(random, w, of_w)
        for operand in problem.epilogue.operands:
            special = _special_values(problem, problem.operand_type(operand))
            _plant(random, operands[operand.name], special)
        if v is not None:
            _hide_rows(random, x, operands)
    for matrix, dtype in ((x, problem.types.x), (w, problem.types.w)):
        if kind is _kind_with_subnormals(dtype):
            _plant_in_rows(random, matrix, (_SUBNORMALS[dtype],))
    return Inputs(
        kind=kind,
        x=x,
        w=_stored(problem, w),
        scales=scales,
        zero_points=zero_points,
        v=v,
        operands=operands,
        row_operands=frozenset(
            operand.name
            for operand in problem.epilogue.operands
            if operand.shape in {OperandShape.MATRIX, OperandShape.COLUMN_VECTOR}
        ),
    )


def _kind_with_subnormals(dtype: DType) -> InputKind | None:
    """Return the kind of inputs, beside SPECIAL, that has subnormal numbers of a type.

    Not the one that calls are timed with where an Intel core multiplies them in microcode: a Xeon
    takes 36 ns for each instruction that reads one, so that a single one in w cost each row of x
    as much as 3000 products.
    """
    if dtype.is_integer:
        return None
    return InputKind.NORMAL if dtype is DType.F16 else InputKind.EXACT


def _elements(
    random: np.random.Generator,
    shape: tuple[int, int],
    kind: InputKind,
    dtype: DType,
    *,
    scale: float = 1.0,
) -> Array:
    # Elements of 4 bits are made in bytes of their own.
    wanted = NUMPY_TYPES[DType.S8 if dtype is DType.S4 else dtype]
    count = shape[0] * shape[1]
    if count > _PERIOD:
        drawn = _elements(random, (1, _PERIOD), kind, dtype, scale=scale)
        return np.resize(drawn, shape)
    if kind is not InputKind.NORMAL:
        least = -3 if dtype.is_signed else 0
        small = random.integers(least, 4, shape, dtype=np.int8)
        return small.astype(wanted) if dtype.is_integer else _scaled(small, scale).astype(wanted)
    if dtype.is_integer:
        least = -(2 ** (dtype.size_bits - 1)) if dtype.is_signed else 0
        return random.integers(least, least + 2**dtype.size_bits, shape, dtype=wanted)
    return _scaled(random.standard_normal(shape, dtype=np.float32), scale).astype(wanted)


def _make_groups(
    problem: Problem, kind: InputKind, random: np.random.Generator, exponent: int
) -> tuple[Array | None, Array | None]:
    """Return the scales and zero points of groups: powers of two where products are exact."""
    if problem.w_group is None:
        return None, None
    shape = (problem.n, problem.w_groups)
    powers = np.exp2(random.integers(exponent - 3, exponent + 1, shape)).astype(np.float32)
    is_normal = kind is InputKind.NORMAL
    largest = 2**problem.types.w.size_bits
    if is_normal:
        powers *= random.uniform(1.0, 2.0, shape).astype(np.float32) / np.float32(largest / 4)
    if not problem.has_zero_points:
        return powers, None
    return powers, random.integers(0, largest if is_normal else 4, shape, dtype=np.uint8)


def _make_values(problem: Problem, kind: InputKind, random: np.random.Generator) -> Array | None:
    """Return the values of attention, with special ones among them; None where there are none."""
    if not problem.operation.has_values:
        return None
    v = _elements(random, (problem.n, problem.k), kind, problem.types.w)
    if kind is InputKind.SPECIAL:
        _plant_in_rows(random, v, _special_values(problem, problem.types.w))
    return v


def _hide_rows(random: np.random.Generator, x: Array, operands: dict[str, Array]) -> None:
    """Hide all keys from a query of numbers, and some from all, where a matrix is added."""
    mask = operands.get("add")
    if mask is not None and mask.size:
        mask[:, random.random(mask.shape[1]) < 0.25] = -np.inf
        of_numbers = np.flatnonzero(np.isfinite(x.astype(np.float32)).all(axis=1))
        mask[of_numbers[-1:]] = -np.inf


def _stored(problem: Problem, w: Array) -> Array:
    """Return w, given as (n, k), as the problem's caller stores it."""
    if problem.types.is_weight_only:
        return store_elements(problem, w.astype(np.int16))
    return w if problem.w_layout is WeightLayout.NK else np.ascontiguousarray(w.T)


def _scaled(values: Array, scale: float) -> Array:
    return values.astype(np.float32) * np.float32(scale)


def _make_operands(
    problem: Problem, kind: InputKind, random: np.random.Generator
) -> dict[str, Array]:
    """Return the operands; the first scale brings sums of integers to the range of y."""
    scale = _unit_of_sums(problem, kind) if problem.types.accumulator.is_integer else 1.0
    operands = {}
    for operand in problem.epilogue.operands:
        dtype = problem.operand_type(operand)
        shape = _operand_shape(operand.shape, problem.m.high, problem.n)
        if dtype is DType.S32:
            quantised = problem.types.x if operand.kind.is_offset else problem.types.y
            least = 0 if quantised is DType.U8 else -20
            operands[operand.name] = random.integers(least, 21, shape, dtype=np.int32)
            continue
        values = random.standard_normal(shape, dtype=np.float32)
        if problem.operation.has_values and kind is InputKind.NORMAL and operand.kind.is_scale:
            # With one below zero, PyTorch 2.13 returns NaN where it hides what is not causal.
            values = np.abs(values)
        if operand.kind.is_scale:
            values, scale = values * np.float32(scale), 1.0
        operands[operand.name] = values.astype(NUMPY_TYPES[dtype])
    return operands


def _unit_of_sums(problem: Problem, kind: InputKind) -> float:
    """Return the factor that makes sums of integers of the size 1, or 50 where y is of bytes."""
    element = 74.0 if kind is InputKind.NORMAL else 2.0  # the standard deviation, roughly
    of_y = 50.0 if problem.types.y.size_bytes == 1 else 1.0
    return float(of_y / (element**2 * np.sqrt(max(1, problem.k))))


def _operand_shape(shape: OperandShape, rows: int, n: int) -> tuple[int, ...]:
    shapes: dict[OperandShape, tuple[int, ...]] = {
        OperandShape.SCALAR: (1,),
        OperandShape.ROW_VECTOR: (n,),
        OperandShape.COLUMN_VECTOR: (rows,),
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


def _special_values(problem: Problem, dtype: DType) -> tuple[float, ...]:
    """Return the values to plant among small numbers.

    Infinity times zero is NaN: subnormal numbers stand beside infinities only where no instruction
    takes them for zero (those for bfloat16 do) and no product of two of them is zero.
    """
    special = _SPECIAL_VALUES[dtype]
    is_kept = dtype is DType.F32 and problem.types.x is not DType.F16
    return (*special, _SUBNORMALS[dtype]) if is_kept else special


def _use_range_of_f16(random: np.random.Generator, x: Array, w: Array) -> None:
    """Make a row of x and one of w subnormal, and one number of x too large for most products.

    Sums stay exact in float32; in float16 they would not.
    """
    _plant_in_rows(random, x, (_LARGEST_F16,))
    for matrix in (x, w):
        rows, columns = matrix.shape
        if rows > 1:
            small = random.integers(-3, 4, columns)
            matrix[random.integers(rows)] = small * _SUBNORMAL_UNIT_F16


def _plant(random: np.random.Generator, array: Array, values: Sequence[float]) -> None:
    flat = array.reshape(-1)
    count = max(0, min(len(values), flat.size - 1))
    if count:
        flat[random.choice(flat.size, count, replace=False)] = values[:count]
