"""A problem whose additions have a fixed order, computed by what defines it, in plain C.

Kernels for such problems are proved to give the same bits. Where none is served, it computes: a
library would add in an order of its own.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.quantise import read_elements
from gemm_tuner.arrays.weights import StoredWeights
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.epilogue import OperandShape, Step
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.finish import built_finish
from gemm_tuner.libraries.numpy_layer import rounded
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.memory import address_of

# Elements of the problem's types; NumPy's own types do not include bfloat16.
Array = NDArray[Any]

_INSTRUCTIONS = frozenset({IsaFeature.AVX2, IsaFeature.FMA})


class _StepStruct(ctypes.Structure):
    """`fixed_order_step_args`."""

    _fields_ = (
        ("operation", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("operand", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
    )


class FixedOrder:
    """The compiled definition: what each element of y is, to the bit.

    `uses_instructions` says whether to multiply and add by instructions, which take a twentieth of
    the time; without them the results are the same.
    """

    def __init__(self, library: ctypes.CDLL, *, uses_instructions: bool | None = None) -> None:
        usable = detect_cpu().isa >= _INSTRUCTIONS
        self._uses_instructions = usable if uses_instructions is None else uses_instructions
        self._library = library
        library.fixed_order_product.argtypes = (
            *(ctypes.c_int64,) * 4,
            *(ctypes.c_void_p,) * 3,
            ctypes.c_int32,
        )
        library.fixed_order_product.restype = None
        library.fixed_order_step.restype = None

    @classmethod
    def load(cls, path: Path) -> "FixedOrder":
        """Return the definition in a library that was built of native/fixed_order.c."""
        return cls(ctypes.CDLL(str(path)))

    def compute(self, problem: Problem, x: Array, w: Array, operands: Sequence[Array]) -> Array:
        """Return y (m, n), a new array: each element has its bits, but for those of a NaN.

        `w` are the weights as `multiplied` returns them, and the operands are in the order of the
        epilogue.
        """
        steps, remaining = [*problem.epilogue.steps], [*operands]
        if problem.types.x.is_integer:
            sums = (x.astype(np.float64) @ w).astype(np.int64)  # exact, whatever the order
            of_w = w.sum(axis=0).astype(np.int64)
            while steps and steps[0].kind.is_offset:
                step = steps.pop(0)
                sums -= _spread(step, remaining.pop(0)).astype(np.int64) * of_w
            values = sums.astype(np.int32)  # sums of 32 bits wrap
            if problem.types.y.is_integer and problem.types.y.size_bytes == 4:
                return values
            y = np.ascontiguousarray(values.astype(np.float32))
        else:
            y = self._product(problem, np.ascontiguousarray(x, np.float32), w)
        for step in steps:
            has_operand = step.kind.operand is not OperandShape.NONE
            self._apply(step, y, remaining.pop(0) if has_operand else None)
        with np.errstate(all="ignore"):
            return rounded(y, problem.types.y)

    def _product(self, problem: Problem, x: Array, w: Array) -> Array:
        (m, k), n = x.shape, w.shape[1]
        y = np.empty((m, n), np.float32)
        self._library.fixed_order_product(
            *(m, n, k, problem.w_group or 0),
            *(address_of(x), address_of(w), address_of(y), int(self._uses_instructions)),
        )
        return y

    def _apply(self, step: Step, values: Array, operand: Array | None) -> None:
        assert step.kind.after_product is not None
        # As the sources of kernels spell them.
        alpha, beta = (*(float(f"{one:.9g}") for one in step.parameters), 0.0, 0.0)[:2]
        args = _StepStruct(step.kind.after_product, alpha, beta, *values.shape, address_of(values))
        if operand is not None:
            read = np.ascontiguousarray(_spread(step, operand), np.float32)
            rows, columns = read.shape
            args.operand = address_of(read)
            args.row_stride = columns if rows > 1 else 0
            args.column_stride = 1 if columns > 1 else 0
        self._library.fixed_order_step(ctypes.byref(args))


def multiplied(problem: Problem, w: Array, scales: Array | None = None) -> Array:
    """Return weights as the definition multiplies them, (k, n): in f32, bytes in float64.

    Below those in groups lie their `scales`, given as (n, groups).
    """
    if scales is not None:
        rows = np.concatenate([read_elements(problem, w), scales], axis=1, dtype=np.float32)
        return np.ascontiguousarray(rows.T)
    of_columns = w.T if problem.w_layout is WeightLayout.NK else w
    wanted = np.float64 if problem.types.x.is_integer else np.float32
    return np.ascontiguousarray(of_columns, wanted)


def _spread(step: Step, operand: Array) -> Array:
    """Return an operand as a matrix, of one row or column where it is the same for all."""
    if step.kind.operand is OperandShape.COLUMN_VECTOR:
        return operand.reshape(-1, 1)
    return np.atleast_2d(operand)


class FixedOrderLayer:
    """One problem with a fixed order of additions, computed by its definition, in one thread."""

    text = "the fixed order in plain C"

    def __init__(self, problem: Problem) -> None:
        """Look for the definition that was built with the package.

        Raises:
            BaselineMissing: there is none.
        """
        library = built_finish()
        if library is None:
            raise BaselineMissing(
                f"there is no kernel for {problem.text!r}, and its fixed order in plain C was not "
                "built with this package: install a C compiler and then gemm-tuner again, or tune "
                "the problem."
            )
        self._problem = problem
        self._order = FixedOrder(library)

    @property
    def layout(self) -> str:
        """Return how the weights are packed."""
        return f"{self.text}, kn"

    def pack(self, weights: StoredWeights) -> Array:
        """Return a copy of the weights, (k, n), in the type in which they are multiplied."""
        return np.array(multiplied(self._problem, weights.w, weights.scales))

    def compute(
        self,
        x: Array,
        packed: Array,
        y: Array,
        operands: Sequence[Array],
        threads: int | None,  # noqa: ARG002 - it has one thread
    ) -> None:
        """Write `epilogue(x @ w)` to y; the operands are in the order of the epilogue."""
        w = packed if self._problem.operation.packs_ahead else multiplied(self._problem, packed)
        y[...] = self._order.compute(self._problem, x, w, operands)
