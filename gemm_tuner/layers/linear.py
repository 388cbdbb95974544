"""A linear layer for NumPy that finds its kernels by itself, or has them tuned."""

from collections.abc import Iterable
from numbers import Integral
from threading import local
from typing import Any, Literal, Never

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.advice import converted
from gemm_tuner.arrays.dlpack import AnyArray, SharedArray, as_array
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.views import view_matrix
from gemm_tuner.domain.context import check_threads
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import Epilogue, OperandShape
from gemm_tuner.domain.layer_problems import MAX_LOSS, layer_problems
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray, InvalidEpilogue, InvalidSetting
from gemm_tuner.layers.rows import RowKernels
from gemm_tuner.layers.sources import AnySource, Tune, check_tuning, open_source
from gemm_tuner.layers.wanted import WantedLayer
from gemm_tuner.runtime.activations import (
    any_matrix_of_floats,
    float_type,
    is_float,
    matrix_of_floats,
    quantise_activations,
    quantise_channels,
)

Array = NDArray[Any]

_INT8 = "u8_s8_s32_f32"
_INT8_STEPS = ("x_row_zero_point", "row_scale", "channel_scale")
# The sum of as many products of the greatest bytes, 255 and 127, has 32 bits.
_MOST_BYTES_SUMMED = (2**31 - 1) // (255 * 127)
# A thread keeps what it quantised to, up to 16 MB, for its next call.
_MOST_KEPT = 1 << 24


def linear(
    w: SharedArray,
    bias: SharedArray | None = None,
    activation: str | None = None,
    *,
    dtype: Literal["int8"] | None = None,
    reduction: Literal["any", "fixed"] = "any",
    source: AnySource = None,
    tune: Tune = "never",
    budget_s: float = 10.0,
    threads: int = 1,
    rows: Iterable[int | str] | int | str | None = None,
) -> "Linear":
    """Return a layer that computes `activation(x @ w.T + bias)` with what is fastest here.

    The weights are copied, and packed once for each layout that its kernels read: what becomes of
    `w` later changes nothing. Where no kernel was tuned, or none is faster, a library computes.

    Args:
        w: (n, k), as in PyTorch; float32, bfloat16 or float16, at any strides: what is stored as
            (k, n) is passed as `w.T`.
        bias: (n,), of any floats.
        activation: a function, or several, of the epilogue table: `relu`, `gelu_erf`, `clamp:0:6`.
        dtype: None to compute in the type of w, which x and y then have; `int8` for weights of
            8 bits, rounded under a scale for each channel, and an x of any of the three types,
            rounded at each call under a scale for each row; y is float32, and k at most 66311.
        reduction: `any`, or `fixed` for rows that have the same bits whatever computes them, and
            beside whatever other rows; where there is no kernel, the plain loop that defines them
            computes, which is slow.
        source: where kernels come from: a `Client`, the address of a service, the URL of a
            database, the path of a lock file; by default the user's own database.
        tune: `never`; or what the source lacks is tuned, by `wait` before the first call with so
            many rows returns, or by `background` while a library computes.
        budget_s: the time to tune each number of rows, in seconds; a service has its own.
        threads: how many threads share a call.
        rows: the numbers of rows that will come, or ranges such as `"17..64"`; by default each of
            the first 16 that come is asked for.

    Raises:
        InvalidArray: `w` or `bias` cannot be used.
        InvalidInput: another argument cannot be used.
        StoreFailed: the database cannot be opened.
    """
    budget_s = check_tuning(tune, budget_s)
    if dtype is not None and not (isinstance(dtype, str) and dtype == "int8"):
        raise InvalidSetting(f"dtype = {dtype!r} is not known; use None, for w's own, or 'int8'.")
    given = any_matrix_of_floats("w", w)
    steps = ["bias"] if bias is not None else []
    steps += _functions_of(activation)
    operands: dict[str, Array] = {}
    weights = np.array(given, order="C")
    types = float_type(given.dtype)
    if dtype == "int8":
        _check_sums(given.shape[1])
        channels = quantise_channels(weights)
        weights, operands = channels.w, {"channel_scale": channels.channel_scale}
        steps = [*_INT8_STEPS, *steps]
    n, k = given.shape
    if bias is not None:
        y_type = NUMPY_TYPES[DType.F32 if dtype == "int8" else types]
        operands["bias"] = _bias_of(bias, n, y_type)
    wanted = WantedLayer(
        n=n,
        k=k,
        rows=_rows_of(rows),
        dtype=_INT8 if dtype == "int8" else types.value,
        epilogue="+".join(steps) or "none",
        threads=check_threads(threads),
        reduction=reduction,
    )
    # They say what is wrong with the epilogue and the rows.
    Problem.create(1, n, k, dtype=wanted.dtype, epilogue=wanted.epilogue, reduction=reduction)
    if rows is not None:
        layer_problems(**wanted.asked, max_loss=MAX_LOSS)
    kernels = RowKernels(
        wanted,
        weights,
        source=open_source(source, may_tune=True),
        tune=tune,
        budget_s=budget_s,
    )
    return Linear(kernels, wanted, operands, x_type=None if dtype == "int8" else types)


class Linear:
    """`y = activation(x @ w.T + bias)`; `linear` makes one. Any number of threads may call it."""

    def __init__(
        self,
        kernels: RowKernels,
        wanted: WantedLayer,
        operands: dict[str, Array],
        *,
        x_type: DType | None,
    ) -> None:
        """Take what computes, and the operands of each call; without `x_type`, x is quantised."""
        self._kernels = kernels
        self._wanted = wanted
        self._operands: dict[str, Any] = operands
        self._x_type = x_type
        self._buffers = local()

    def __reduce__(self) -> Never:
        """Refuse to be copied or pickled.

        Raises:
            InvalidSetting: always.
        """
        raise InvalidSetting(
            "a layer cannot be copied or pickled: any number of threads may share it, and another "
            "process makes its own, with gemm_tuner.linear."
        )

    def __repr__(self) -> str:
        """Return what it computes."""
        one = self._wanted
        return f"Linear({one.dtype!r}, n={one.n}, k={one.k}, {one.epilogue!r})"

    def __call__(self, x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
        """Return the layer of `x`.

        Args:
            x: (m, k), any number of rows, at any distance; of NumPy, or of any library that speaks
                DLPack.
            out: (m, n), where the result goes, and what is returned; by default a new array.

        Raises:
            InvalidArray: `x` or `out` cannot be used.
        """
        ready = self._kernels.known(_rows_told_by(x))
        if ready is None:
            ready = self._kernels.find(self._check_rows(x))
        if self._x_type is not None:
            return ready.kernel(x, ready.packed, out=out, **self._operands)
        quantised = quantise_activations(x, out=self._take_buffer(x))
        y: AnyArray = ready.kernel(
            quantised.x, ready.packed, out=out, **quantised.operands, **self._operands
        )
        if type(x) is np.ndarray and quantised.x.size <= _MOST_KEPT:
            self._buffers.quantised = quantised
        return y

    def explain(self) -> str:
        """Return what computes each number of rows that came so far, and why."""
        return self._kernels.explain()

    def refresh(self) -> None:
        """Ask for kernels again at the next calls, as after `gemm-tuner sweep`."""
        self._kernels.refresh()

    def _check_rows(self, x: object) -> int:
        given = matrix_of_floats("x", x).array
        dtype = self._x_type or float_type(given.dtype)
        view_matrix("x", given, (len(given), self._wanted.k), dtype)
        return len(given)

    def _take_buffer(self, x: object) -> Any:  # noqa: ANN401 - of any array
        """Return what the last call of this thread quantised to, if this one can write to it.

        It is this call's alone: a signal handler may call the layer before the call ends.
        """
        kept = vars(self._buffers).pop("quantised", None)
        if kept is None or type(x) is not np.ndarray or kept.x.shape != x.shape:
            return None
        return kept


def _check_sums(k: int) -> None:
    if k > _MOST_BYTES_SUMMED:
        raise InvalidArray(
            f"w has k = {k}, but 32 bits hold the sum of at most {_MOST_BYTES_SUMMED} products of "
            "bytes: use dtype=None, or add the results of pieces of k."
        )


def _rows_of(rows: object) -> tuple[int | str, ...]:
    if rows is None:
        return ()
    if isinstance(rows, Integral):
        return (int(rows),)
    if isinstance(rows, str):
        return (rows,)
    if not isinstance(rows, Iterable):
        raise InvalidSetting(f"rows = {rows!r} cannot be used; give such as [1, 16, '17..64'].")
    return tuple(rows)


def _functions_of(activation: str | None) -> list[str]:
    if activation is None:
        return []
    if not isinstance(activation, str):
        raise InvalidEpilogue(
            f"activation is a {type(activation).__name__}; give its name, such as 'relu'."
        )
    steps = Epilogue.parse(activation).steps
    for step in steps:
        if step.kind.operand is not OperandShape.NONE:
            raise InvalidEpilogue(
                f"activation {activation!r} reads an array, {step.kind.name}; use functions of one "
                "value, such as 'relu' or 'gelu_erf', or a kernel of Client or tune."
            )
    return [step.text for step in steps]


def _rows_told_by(x: object) -> int:
    try:
        shape = getattr(x, "shape", None)
    except RuntimeError:  # a nested tensor of PyTorch has none; what is wrong with it is said later
        shape = None
    return shape[0] if isinstance(shape, tuple) and len(shape) == 2 else -1


def _bias_of(bias: object, n: int, dtype: np.dtype[Any]) -> Array:
    given = as_array("bias", bias)
    if not isinstance(given, np.ndarray) or given.shape != (n,):
        raise InvalidArray(
            f"bias has the shape {getattr(given, 'shape', None)}, but ({n},) is needed."
        )
    if not is_float(given.dtype) and given.dtype.kind != "f":
        raise InvalidArray(
            f"bias has the dtype {given.dtype}, but floats are needed: "
            f"pass {converted('bias', given, dtype)}."
        )
    return np.array(given, dtype, order="C")
