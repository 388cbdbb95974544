"""The rest of an epilogue in one pass over the results of a library's product, in C.

The same source, native/finish.c, is built with the package for what runs where no kernel is served,
and by the compiler of a sweep for what kernels are compared with.
"""

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.domain.epilogue import MAX_STEPS, OperandShape, Step, StepKind
from gemm_tuner.domain.spelling import PassOperation
from gemm_tuner.machine.memory import address_of
from gemm_tuner.resources import digest_of_sources, library_native_sources

Array = NDArray[Any]

_LOG = logging.getLogger(__name__)

# Built by hatch_build.py where there is a compiler.
_BUILT = Path(__file__).resolve().parent / "_finish.so"

# fmt: off
# `shape` and `type` of native/finish.c.
_SHAPES = {
    OperandShape.NONE: 0, OperandShape.SCALAR: 1, OperandShape.ROW_VECTOR: 2,
    OperandShape.COLUMN_VECTOR: 3, OperandShape.MATRIX: 4,
}
# Added to a matrix of zeros, a column is spread over it.
_ADD_COLUMN = StepKind(
    name="add",
    operand=OperandShape.COLUMN_VECTOR,
    cpp="",
    after_product=PassOperation.ADD,
    reference=lambda _xp, value, operand: value + operand,
)
_TYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "int32": 4, "int8": 5, "uint8": 6}
# fmt: on


class _StepStruct(ctypes.Structure):
    """`finish_step`."""

    _fields_ = (
        ("operation", ctypes.c_int32),
        ("shape", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("distance", ctypes.c_int64),
        ("operand", ctypes.c_void_p),
    )


class TeamStruct(ctypes.Structure):
    """`finish_team`: how OpenMP runs a function in its threads; all zero for one thread."""

    _fields_ = (
        ("parallel", ctypes.c_void_p),
        ("thread", ctypes.c_void_p),
        ("threads", ctypes.c_void_p),
    )


class _CallStruct(ctypes.Structure):
    """`finish_call`."""

    _fields_ = (
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
        ("sums_distance", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("y_distance", ctypes.c_int64),
        ("sums_type", ctypes.c_int32),
        ("y_type", ctypes.c_int32),
        ("sums_of_w", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("k", ctypes.c_int64),
        ("w_distance", ctypes.c_int64),
        ("w_type", ctypes.c_int32),
        ("w_is_kn", ctypes.c_int32),
        ("team", TeamStruct),
        ("step_count", ctypes.c_int32),
        ("steps", _StepStruct * MAX_STEPS),
    )


class Operation(NamedTuple):
    """A step of an epilogue and the array that it reads, contiguous rows, if it reads one."""

    step: Step
    operand: Array | None


def operations_of(steps: Sequence[Step], operands: Sequence[Array]) -> list[Operation]:
    """Return steps with the arrays that they read."""
    remaining = iter(operands)
    return [
        Operation(step, None if step.kind.operand is OperandShape.NONE else next(remaining))
        for step in steps
    ]


def spread_of(column: Array) -> Operation:
    """Return a pass that adds the element of a column to each element of a row."""
    return Operation(Step(kind=_ADD_COLUMN), column)


class GivenWeights(NamedTuple):
    """Weights of 8 bits, (n, k) or (k, n) with dense rows, whose columns a pass adds up."""

    w: Array
    is_kn: bool

    @property
    def fields(self) -> tuple[int, int, int, int, int]:
        """Return the fields of `finish_call` from `w` on."""
        k = self.w.shape[0 if self.is_kn else 1]
        distance = self.w.strides[0] // self.w.itemsize
        return address_of(self.w), k, distance, _TYPES[self.w.dtype.name], self.is_kn


class Finish:
    """One pass, ready to be run any number of times; the arrays must live as long."""

    def __init__(
        self,
        operations: Sequence[Operation],
        sums: Array,
        y: Array,
        *,
        sums_of_w: Array | None = None,
        w: GivenWeights | None = None,
        team: TeamStruct | None = None,
    ) -> None:
        """Describe the pass from `sums` to `y`, both (m, n) with dense rows.

        `sums_of_w`, (n,) of int32, are needed for offsets; of a `w` that is given in each call,
        the pass finds them. A `team` shares the rows out.
        """
        if w is not None:
            sums_of_w = np.zeros(y.shape[1], np.int32)
        self._arrays = (*operations, sums, y, sums_of_w, w)
        steps = (_StepStruct * MAX_STEPS)(*(_describe(one) for one in operations))
        self._struct = _CallStruct(
            *y.shape,
            address_of(sums),
            sums.strides[0] // sums.itemsize,
            address_of(y),
            y.strides[0] // y.itemsize,
            _TYPES[sums.dtype.name],
            _TYPES[y.dtype.name],
            None if sums_of_w is None else address_of(sums_of_w),
            *((None, 0, 0, 0, 0) if w is None else w.fields),
            team or TeamStruct(),
            len(operations),
            steps,
        )

    @property
    def address(self) -> int:
        """Return the argument of `finish_rows`."""
        return ctypes.addressof(self._struct)

    def run(self, library: ctypes.CDLL) -> None:
        """Write y."""
        library.finish_rows(ctypes.byref(self._struct))


def has_operation(step: Step) -> bool:
    """Say whether the pass knows a step."""
    return step.kind.after_product is not None


@cache
def built_finish() -> ctypes.CDLL | None:
    """Return the pass that was built with the package, None if none or one of another source."""
    if not _BUILT.is_file():
        return None
    library = load_finish(_BUILT)
    source = digest_of_sources(library_native_sources())
    if hasattr(library, "finish_source_sha256"):
        carried = (ctypes.c_char * (len(source) + 1)).in_dll(library, "finish_source_sha256").value
        if carried.decode() == source:
            return library
    _LOG.warning(
        "NumPy computes what the pass in C would: %s was built from another source; run "
        "python hatch_build.py in a checkout, or install gemm-tuner again.",
        _BUILT,
    )
    return None


def load_finish(path: Path) -> ctypes.CDLL:
    """Return the loaded pass."""
    library = ctypes.CDLL(str(path))
    library.finish_rows.restype = None
    return library


def sums_of_columns(w: Array, axis: int) -> NDArray[np.int32]:
    """Return the sums of w along k, which is the `axis` of it."""
    sums: NDArray[np.int32] = w.sum(axis=axis, dtype=np.int32)
    return sums


def _describe(operation: Operation) -> _StepStruct:
    step, operand = operation
    alpha, beta = (*step.parameters, 0.0, 0.0)[:2]
    kind = step.kind
    assert kind.after_product is not None
    struct = _StepStruct(kind.after_product, _SHAPES[kind.operand], 0, alpha, beta, 0, None)
    if operand is not None:
        struct.type = _TYPES[operand.dtype.name]
        struct.operand = address_of(operand)
        if operand.ndim > 1:
            struct.distance = operand.strides[0] // operand.itemsize
    return struct
