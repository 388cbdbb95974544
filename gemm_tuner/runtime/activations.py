"""Activations as bytes, and weights as bytes by channel: what a kernel for int8 takes.

A number is `scale * (element - zero_point)`; signed elements have no zero point. A row, the whole
array, or a channel shares a scale. The call path in C does it (native/quantise.c), or NumPy where
that was not built, with the same bits.
"""

from functools import cache
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import ArrayView
from gemm_tuner.arrays.advice import converted
from gemm_tuner.arrays.dlpack import SharedArray, as_array, element_type, new_result
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES, is_bfloat16
from gemm_tuner.arrays.views import check_overlap, view_matrix, view_operand, view_output
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.errors import InvalidArray, InvalidProblem, InvalidSetting
from gemm_tuner.machine.memory import address_of
from gemm_tuner.runtime.direct import NATIVE

Array = NDArray[Any]

# The types of x, as native/quantise.h numbers them, by their names in NumPy.
_TYPES = (DType.F32, DType.BF16, DType.F16)
_FLOATS = {NUMPY_TYPES[one]: one for one in (DType.F32, DType.F16)}
_BYTES = {"u8": DType.U8, "s8": DType.S8}
# The operands that hold the scales and the zero points, by what shares one.
_OPERANDS = {"row": ("row_scale", "x_row_zero_point"), "tensor": ("scale", "x_zero_point")}

# No instruction makes a subnormal number of it, whatever the mode of the CPU.
_LEAST_SCALE = np.float32(2.0**-126)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether matrices of a type can be quantised."""
    return dtype in _FLOATS or is_bfloat16(dtype)


def float_type(dtype: np.dtype[Any]) -> DType:
    """Return the type of elements for a type of NumPy that `is_float`."""
    return DType.BF16 if is_bfloat16(dtype) else _FLOATS[dtype]


@cache
def _told_types(native: ModuleType) -> ModuleType:
    """Return the call path in C, which knows the types of elements from now on."""
    types = (*_TYPES, DType.S8, DType.U8, DType.S32)
    native.set_quantise_types(*(element_type(NUMPY_TYPES[one]) for one in types))
    return native


class QuantisedActivations(NamedTuple):
    """What a kernel for int8 takes: `kernel(q.x, packed, **q.operands, channel_scale=...)`.

    x: (m, k), uint8 or int8. scale: (m,) or (1,), float32. zero_point: as many, int32, or None for
    signed elements. per: what shares a scale, `row` or `tensor`.
    """

    x: Any
    scale: Any
    zero_point: Any
    per: str

    @property
    def operands(self) -> dict[str, Any]:
        """Return what the epilogue reads: `x_row_zero_point+row_scale`, or those of a tensor."""
        scale_name, zero_name = _OPERANDS[self.per]
        if self.zero_point is None:
            return {scale_name: self.scale}
        return {scale_name: self.scale, zero_name: self.zero_point}


class QuantisedChannels(NamedTuple):
    """Weights for `kernel.pack(q.w)`, whose calls take `channel_scale=q.channel_scale`.

    w: int8, of the shape that was given. channel_scale: (n,), float32.
    """

    w: NDArray[np.int8]
    channel_scale: NDArray[np.float32]


def quantise_activations(
    x: SharedArray,
    dtype: Literal["u8", "s8"] = "u8",
    *,
    per: Literal["row", "tensor"] = "row",
    out: QuantisedActivations | None = None,
) -> QuantisedActivations:
    """Return `x` as bytes, each row or the whole array under its own scale.

    Unsigned elements map the least and the greatest number of a row, and zero, which stays exact,
    to 0 to 255; signed ones have no zero point, and map the greatest magnitude to 127. Numbers are
    multiplied by the reciprocal of the scale and rounded to nearest, ties to even.

    A number is off by at most half a scale, and 5e-5 of a scale for the roundings before; of the
    greatest unsigned elements, 255, up to twice as much. A scale is at least 2**-126. With NaN or
    infinity in a row, its scale is NaN, and so are its results; its elements are 0.

    Args:
        x: (m, k), float32, bfloat16 or float16; rows at any distance, which are read in place.
        dtype: `u8` or `s8`.
        per: what shares a scale, `row` or `tensor`.
        out: what an earlier call with the same arguments returned, or arrays like that: it is
            written and returned, and nothing is allocated.

    Raises:
        InvalidArray: `x` or an array of `out` cannot be used, or they overlap.
        InvalidSetting: `dtype` or `per` is not known.
    """
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise InvalidSetting(f"activations cannot be quantised to {dtype!r}; use 'u8' or 's8'.")
    if not isinstance(per, str) or per not in _OPERANDS:
        raise InvalidSetting(f"per = {per!r} is not known; use 'row' or 'tensor'.")
    if out is None and (getattr(x, "ndim", 0) != 2 or not hasattr(x, "__dlpack__")):
        matrix_of_floats("x", x)  # says what is wrong
    made = _new(x, _BYTES[dtype], per) if out is None else out
    if not _is_done_directly(x, made, dtype, per):
        task = _task_of(matrix_of_floats("x", x), made, _BYTES[dtype], per)
        task.check_overlap()
        task.run()
    return made


def quantise_channels(w: SharedArray, *, w_layout: str = "nk") -> QuantisedChannels:
    """Return weights as int8, each channel (column of y) under a scale of its own.

    They are for kernels such as `u8_s8_s32_f32 128x256x768 nk x_row_zero_point+row_scale+
    channel_scale`. The greatest magnitude of a channel becomes 127; the error is that of signed
    activations.

    Args:
        w: (n, k), or (k, n) with the layout `kn`; float32, bfloat16 or float16, all finite.
        w_layout: `nk` or `kn`.

    Raises:
        InvalidArray: `w` is no such matrix, or holds NaN or infinity.
        InvalidProblem: `w_layout` is not known.
    """
    if not isinstance(w_layout, str) or w_layout not in ("nk", "kn"):
        raise InvalidProblem(f"the layout {w_layout!r} has no channels; use 'nk' or 'kn'.")
    given = as_array("w", w)
    if w_layout == "kn" and isinstance(given, np.ndarray):
        given = np.ascontiguousarray(given.T)
    channels = matrix_of_floats("w", given)
    n, k = channels.array.shape
    elements, scales = np.empty((n, k), np.int8), np.empty(n, np.float32)
    y = CheckedMatrix(elements, view_matrix("w", elements, (n, k), DType.S8))
    _Task(channels, y, scales, None, is_one_scale=False).run()
    if not np.all(np.isfinite(scales)):
        raise InvalidArray(
            f"w holds NaN or infinity in channel {int(np.argmin(np.isfinite(scales)))}, which no "
            "integer stands for; replace them."
        )
    stored = elements if w_layout == "nk" else np.ascontiguousarray(elements.T)
    return QuantisedChannels(stored, scales)


class CheckedMatrix(NamedTuple):
    """A matrix that was checked, and where it lies."""

    array: Array
    view: ArrayView


class _Task(NamedTuple):
    """What is read and what is written, all checked."""

    x: CheckedMatrix
    y: CheckedMatrix
    scales: Array
    zero_points: Array | None
    is_one_scale: bool

    def check_overlap(self) -> None:
        """Check that no two arrays share memory.

        Raises:
            InvalidArray: they do.
        """
        read = {"x": self.x.array}
        written = {"out.x": self.y.array, "out.scale": self.scales}
        if self.zero_points is not None:
            written["out.zero_point"] = self.zero_points
        for name, array in written.items():
            for other_name, other in read.items():
                check_overlap(array, other_name, other)
            read[name] = array

    def run(self) -> None:
        """Write the bytes, the scales and the zero points."""
        if NATIVE is None:
            _quantise_by_numpy(self)
            return
        _told_types(NATIVE).quantise_at(
            *self.x.array.shape,
            self.x.view.address,
            self.x.view.leading_dimension,
            self.y.view.address,
            self.y.view.leading_dimension,
            address_of(self.scales),
            0 if self.zero_points is None else address_of(self.zero_points),
            _TYPES.index(float_type(self.x.array.dtype)),
            self.is_one_scale,
        )


def _is_done_directly(x: SharedArray, made: QuantisedActivations, dtype: str, per: str) -> bool:
    """Quantise if every argument is valid beyond doubt, and return whether that was done."""
    return (
        NATIVE is not None
        and isinstance(made, QuantisedActivations)
        and made.per == per
        and (made.zero_point is None) == (dtype == "s8")
        and _told_types(NATIVE).quantise(x, made.x, made.scale, made.zero_point, per == "tensor")
    )


def _quantise_by_numpy(task: _Task) -> None:
    """Write what the pass in C would, to the last bit."""
    values = task.x.array.astype(np.float32)
    axis = None if task.is_one_scale else 1
    with np.errstate(all="ignore"):
        greatest = values.max(axis=axis, initial=0, keepdims=True)
        least = values.min(axis=axis, initial=0, keepdims=True)
        is_finite = np.isfinite(greatest) & np.isfinite(least)
        if task.zero_points is None:
            step = np.maximum(greatest, -least) / np.float32(127)
        else:
            step = greatest / np.float32(255) - least / np.float32(255)
        step = np.maximum(step, _LEAST_SCALE)
        inverse = 1 / step
        numbers = np.rint(values * inverse)
        if task.zero_points is not None:
            zero_points = np.where(is_finite, np.rint(-least * inverse), 0)
            numbers += zero_points
            task.zero_points[...] = zero_points.ravel()
        numbers = np.where(is_finite, np.minimum(numbers, 255), 0)
        task.y.array[...] = numbers.astype(task.y.array.dtype)
    task.scales[...] = np.where(is_finite, step, np.nan).ravel()


def matrix_of_floats(name: str, value: object) -> CheckedMatrix:
    """Return a matrix of floats, its rows at any distance.

    Raises:
        InvalidArray: it is none, or its strides cannot be used.
    """
    given = any_matrix_of_floats(name, value)
    return CheckedMatrix(given, view_matrix(name, given, given.shape, float_type(given.dtype)))


def any_matrix_of_floats(name: str, value: object) -> Array:
    """Return a matrix of floats, whatever its strides.

    Raises:
        InvalidArray: it is none.
    """
    given = as_array(name, value)
    if not isinstance(given, np.ndarray) or given.ndim != 2:
        what = f"is a {type(given).__name__}"
        if isinstance(given, np.ndarray):
            what = f"has the shape {given.shape}"
        raise InvalidArray(f"{name} {what}, but an array of two dimensions is needed.")
    if not is_float(given.dtype):
        raise InvalidArray(
            f"{name} has the dtype {given.dtype.str}, but float32, bfloat16 or float16 is needed: "
            f"pass {converted(name, given, NUMPY_TYPES[DType.F32])}."
        )
    return given


def _scales_of(per: str, rows: int) -> int:
    return rows if per == "row" else 1


def _new(x: Any, element: DType, per: str) -> QuantisedActivations:  # noqa: ANN401 - an array
    def made(shape: tuple[int, ...], dtype: DType) -> Any:  # noqa: ANN401 - as x is
        if type(x) is np.ndarray:  # new_result takes several times as long
            return np.empty(shape, NUMPY_TYPES[dtype])
        return new_result(x, shape, NUMPY_TYPES[dtype])

    count = (_scales_of(per, x.shape[0]),)
    return QuantisedActivations(
        x=made(tuple(x.shape), element),
        scale=made(count, DType.F32),
        zero_point=None if element is DType.S8 else made(count, DType.S32),
        per=per,
    )


def _task_of(x: CheckedMatrix, made: QuantisedActivations, element: DType, per: str) -> _Task:
    if not isinstance(made, QuantisedActivations) or made.per != per:
        raise InvalidArray(
            f"out is a {type(made).__name__} for per = {getattr(made, 'per', None)!r}: pass what "
            f"quantise_activations returned for per = {per!r}, or None."
        )
    shape = x.array.shape
    y = as_array("out.x", made.x)
    view = view_output(y, shape, element)
    assert isinstance(y, np.ndarray)
    count = _scales_of(per, shape[0])
    scales = _vector("out.scale", made.scale, count, DType.F32)
    if element.is_signed != (made.zero_point is None):
        raise InvalidArray(
            f"out.zero_point is a {type(made.zero_point).__name__}: elements of {element.value} "
            f"have {'none' if element.is_signed else 'zero points'}; pass what "
            "quantise_activations returned for them."
        )
    zeros = (
        None if element.is_signed else _vector("out.zero_point", made.zero_point, count, DType.S32)
    )
    return _Task(x, CheckedMatrix(y, view), scales, zeros, is_one_scale=per == "tensor")


def _vector(name: str, value: object, length: int, dtype: DType) -> Array:
    _view, array = view_operand(
        name, as_array(name, value), OperandShape.ROW_VECTOR, (1, length), dtype
    )
    if not array.flags.writeable:
        raise InvalidArray(f"{name} is read-only, but it is written to: pass a copy.")
    return array
