"""What runs when no kernel is served: the same calls as a kernel, on NumPy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem, WeightLayout
from gemm_tuner.errors import InvalidArray
from gemm_tuner.runtime.arrays import (
    NUMPY_TYPES,
    check_operand_names,
    check_overlap,
    view_matrix,
    view_operand,
    view_output,
)
from gemm_tuner.runtime.batch import PackedBatch, batch_of, batch_of_weights, products_of
from gemm_tuner.runtime.dlpack import AnyArray, as_array, new_result
from gemm_tuner.runtime.packed import PackedWeights
from gemm_tuner.runtime.quantise import QuantisedWeights, dequantise_weights
from gemm_tuner.runtime.weights import check_weights

_ERF_COEFFICIENTS = np.array(
    [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592], np.float32
)


def _gelu_erf(_xp: object, value: NDArray[np.float32], _operand: None) -> NDArray[np.float32]:
    """Return x times the normal distribution function of x, in whole-array steps.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: the error of erf is
    at most 1.5e-7.
    """
    magnitude = np.abs(value) * np.float32(0.7071067811865476)
    t = 1 / (1 + np.float32(0.3275911) * magnitude)
    polynomial = t * np.polyval(_ERF_COEFFICIENTS, t)
    tail = polynomial * np.exp(-magnitude * magnitude) / 2
    return np.asarray(value * np.where(value < 0, tail, 1 - tail), dtype=np.float32)


# NumPy has no erf: the table's reference calls Python for each element.
_WHOLE_ARRAY_STEPS: dict[str, Callable[..., NDArray[np.generic]]] = {"gelu_erf": _gelu_erf}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FallbackKernel:
    """A problem computed by NumPy, in float32 or integers, and the reason why no kernel does it.

    It is called like a `Kernel`: pack the weights once, then call.
    """

    problem: Problem
    reason: str

    def pack(
        self, w: object, *, scales: object = None, zero_points: object = None
    ) -> PackedWeights:
        """Return a copy of the weights, ready to be multiplied; the arguments are `Kernel.pack`'s.

        Raises:
            InvalidArray: an array is missing or not wanted, or its type, shape or strides cannot
                be used.
        """
        problem = self.problem
        weights = check_weights(problem, w, scales, zero_points)
        if weights.scales is not None:
            quantised = QuantisedWeights(weights.w, weights.scales, weights.zero_points)
            columns = dequantise_weights(problem, quantised).astype(np.float32)
            return PackedWeights(owner=self._name, memory=columns.T)
        is_nk = problem.w_layout is WeightLayout.NK
        # Sums of integers are exact in float64.
        copied = weights.w.astype(np.float64 if problem.types.w.is_integer else np.float32)
        return PackedWeights(owner=self._name, memory=copied.T if is_nk else copied)

    def __call__(
        self,
        x: AnyArray,
        packed: PackedWeights,
        *,
        out: AnyArray | None = None,
        threads: int | None = None,  # noqa: ARG002 - NumPy chooses its threads itself
        **operands: object,
    ) -> AnyArray:
        """Return `epilogue(x @ w)`; the arguments are those of `Kernel`.

        Raises:
            InvalidArray: an array is missing, or its type, shape or strides cannot be used.
        """
        problem = self.problem
        packed.check_owner(self._name)
        given = as_array("x", x)
        if not isinstance(given, np.ndarray) or given.ndim != 2 or len(given) not in problem.m:
            raise InvalidArray(
                f"x has the shape {getattr(given, 'shape', 'of no array')}, but "
                f"({problem.m.text}, {problem.k}) is needed; ask for a kernel of its size."
            )
        shape = (len(given), problem.n)
        view_matrix("x", given, (shape[0], problem.k), problem.types.x)
        arrays = self._operand_arrays(operands, shape)
        result = new_result(x, shape, NUMPY_TYPES[problem.types.y]) if out is None else out
        y = as_array("out", result)
        view_output(y, shape, problem.types.y)
        assert isinstance(y, np.ndarray)
        if out is not None:
            check_overlap(y, "x", given)
        # A kernel computes with infinities in silence, and so does its substitute.
        with np.errstate(all="ignore"):
            product = np.matmul(given.astype(packed.memory.dtype, copy=False), packed.memory)
            y[...] = _rounded(self._epilogue(product, packed.memory, arrays), problem.types.y)
        return result

    def pack_batch(
        self, w: object, *, scales: object = None, zero_points: object = None
    ) -> PackedBatch:
        """Return a copy of the weights of each product; the arguments are `Kernel.pack_batch`'s.

        Raises:
            InvalidArray: an array is missing or not wanted, or its type, shape or strides cannot
                be used.
        """
        copies = [
            self.pack(one, scales=scale, zero_points=zero).memory
            for one, scale, zero in batch_of_weights(w, scales, zero_points)
        ]
        return PackedBatch(
            packer=self._name, products=np.stack(copies) if copies else np.empty((0, 0, 0))
        )

    def batch(
        self,
        x: AnyArray,
        packed: PackedWeights | PackedBatch,
        *,
        out: AnyArray | None = None,
        threads: int | None = None,
        **operands: object,
    ) -> AnyArray:
        """Return `epilogue(x @ w)` for each product; the arguments are those of `Kernel.batch`.

        Raises:
            InvalidArray: an array is missing, or its type, shape or strides cannot be used.
        """
        given = batch_of("x", x, "(batch, m, k)")
        count = len(given)
        if isinstance(packed, PackedBatch):
            packed.check(self._name, count)
            weights = [PackedWeights(owner=self._name, memory=one) for one in packed.products]
        else:
            weights = [packed] * count
        shape = (count, given.shape[1], self.problem.n)
        result = new_result(x, shape, NUMPY_TYPES[self.problem.types.y]) if out is None else out
        y = batch_of("out", result, f"of the shape {shape}")
        if len(y) != count:
            raise InvalidArray(f"out has the shape {y.shape}, but {shape} is needed.")
        products = products_of(self.problem.epilogue.operands, operands, count)
        for one_x, one_w, one_y, its_operands in zip(given, weights, y, products, strict=True):
            self(one_x, one_w, out=one_y, threads=threads, **its_operands)
        return result

    @property
    def _name(self) -> str:
        return f"NumPy for {self.problem.text}"

    def _operand_arrays(
        self, operands: dict[str, object], shape: tuple[int, int]
    ) -> list[NDArray[np.generic]]:
        epilogue = self.problem.epilogue
        check_operand_names(epilogue, operands)
        return [
            view_operand(
                wanted.name,
                as_array(wanted.name, operands[wanted.name]),
                wanted.shape,
                shape,
                self.problem.operand_type(wanted),
            )[1]
            for wanted in epilogue.operands
        ]

    def _epilogue(
        self,
        value: NDArray[np.generic],
        w: NDArray[np.generic],
        arrays: list[NDArray[np.generic]],
    ) -> NDArray[np.generic]:
        remaining = iter(arrays)
        for step in self.problem.epilogue.steps:
            kind = step.kind
            operand: NDArray[np.generic] | None = None
            if kind.operand is not OperandShape.NONE:
                operand = next(remaining).astype(value.dtype, copy=False)
                if kind.operand is OperandShape.COLUMN_VECTOR:
                    operand = operand[:, np.newaxis]
                if kind.is_offset:
                    operand = operand * w.sum(axis=0)
            compute: Callable[..., NDArray[np.generic]] = _WHOLE_ARRAY_STEPS.get(
                kind.name, kind.reference
            )
            value = np.asarray(compute(np, value, operand, *step.parameters), dtype=value.dtype)
        return value


def _rounded(value: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Return a result in its type: integers are rounded to even and saturated, NaN is the least."""
    wanted = NUMPY_TYPES[dtype]
    if not dtype.is_integer:
        return value.astype(wanted, copy=False)
    limits = np.iinfo(wanted)
    finite = np.where(np.isnan(value), limits.min, value)
    return np.clip(np.rint(finite), limits.min, limits.max).astype(wanted)
