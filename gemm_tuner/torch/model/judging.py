"""Each call of a kernel in a model beside the exact result of what it read."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import ArgsStruct, ArrayView
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.bench.reproduce import KernelCall, row_operands
from gemm_tuner.bench.tolerance import find_error, shares_of_bounds
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.step_kind import OperandShape
from gemm_tuner.domain.weight_layout import WeightLayout
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.torch.operators import OperatorLayer, count_parts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownLayer:
    """A layer of a model, its kernels, and the weights (n, k) of its products as they are now.

    Products of two activations have none.
    """

    name: str
    layer: OperatorLayer
    w: Sequence[NDArray[Any]]
    scales: NDArray[np.float32] | None = None  # (n, groups), of weights that have some
    zero_points: NDArray[np.float32] | None = None  # likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """How far the calls of one layer are from the exact results of what they read.

    `share` is the largest error as a share of its bound: above 1, the layer is wrong, and
    `why_wrong` says where. `seconds` is the time of all its calls in one run of the model.
    """

    name: str
    problem: str
    kernels: tuple[str, ...]
    calls: int
    share: float
    why_wrong: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrongCall:
    """The first call whose result is wrong: what it was, and where its elements are wrong."""

    name: str
    number: int  # of the call, from 1 for the first of this layer
    why: str
    kernel_call: KernelCall
    shares: NDArray[np.float64]


class Judge:
    """Compares calls with exact results, as a model makes them."""

    def __init__(self, known: Callable[[int, ArgsStruct], KnownLayer | None]) -> None:
        """Take what finds the layer that a call is of."""
        self._known = known
        self.errors: dict[str, LayerError] = {}
        self.first_wrong: WrongCall | None = None
        self.kernels: dict[str, Kernel] = {}
        self.unknown = 0

    def see(self, number: int, args: ArgsStruct, _time_ns: int) -> None:
        """Judge a call."""
        known, products = self._known(number, args), self._products(number, args)
        if known is None or not products:
            self.unknown += 1
            return
        kernel = products[0].kernel_call.kernel
        self.kernels[kernel.artifact.sha256] = kernel
        before = self.errors.get(
            known.name,
            LayerError(name=known.name, problem=kernel.problem.text, kernels=(), calls=0, share=0),
        )
        share, why_wrong = before.share, before.why_wrong
        for place, one in enumerate(products):
            expected = one.kernel_call.expected
            shares = shares_of_bounds(expected, one.y)
            share = max(share, float(shares.max(initial=0.0)))
            error = find_error(expected, one.y)
            if error is None:
                continue
            why = error if len(products) == 1 else f"in product {place} of its batch {error}"
            why_wrong = why_wrong or why
            if self.first_wrong is None:
                self.first_wrong = WrongCall(
                    name=known.name,
                    number=before.calls + 1,
                    why=why,
                    kernel_call=one.held,
                    shares=shares,
                )
        self.errors[known.name] = replace(
            before,
            kernels=tuple(dict.fromkeys([*before.kernels, kernel.artifact.sha256])),
            calls=before.calls + 1,
            share=share,
            why_wrong=why_wrong,
        )

    def correct(self, number: int, args: ArgsStruct, _time_ns: int) -> None:
        """Put the exact result, rounded to the type of y, in the place of what was computed."""
        for one in self._products(number, args):
            values = one.kernel_call.expected.values
            with np.errstate(over="ignore"):
                one.y[...] = np.rint(values) if one.y.dtype.kind in "iu" else np.float32(values)

    def _products(self, number: int, args: ArgsStruct) -> list["_Product"]:
        """Return the products of a call: several of a batch; none if its kernel is not known."""
        known = self._known(number, args)
        placed = None if known is None else known.layer.kernel_for(args.m)
        if known is None or placed is None:
            return []
        if not placed.kernel.problem.operation.packs_ahead:
            places = product(range(args.batch), range(args.heads))
            return [_Place(args, *one).of_activations(placed.kernel) for one in places]
        return [
            _Place(args, number).of_weights(placed.kernel, w, known)
            for number, w in enumerate(known.w)
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Product:
    """One product: the call of its kernel, what it computed, and its weights if they are packed."""

    kernel_call: KernelCall
    y: NDArray[Any]
    packed: NDArray[np.uint8] | None = None

    @property
    def held(self) -> KernelCall:
        """Return its call with copies of its arrays, which the model may write to after it."""
        call = self.kernel_call
        return replace(
            call,
            x=call.x.copy(),
            w=call.w.copy(),
            operands={name: one.copy() for name, one in call.operands.items()},
            packed=None if self.packed is None else self.packed.copy(),
            v=None if call.v is None else call.v.copy(),
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """One product of a call: its place in the batch, and in its heads."""

    args: ArgsStruct
    batch: int
    head: int = 0

    def of_weights(self, kernel: Kernel, w: NDArray[Any], known: KnownLayer) -> _Product:
        """Return a product with these weights, which the call reads as they are packed."""
        size_bytes = kernel.native.packed_weight_bytes
        address = self.args.packed_w + self.batch * self.args.packed_w_batch_stride_bytes
        groups: dict[str, Any] = {"scales": known.scales, "zero_points": known.zero_points}
        call = KernelCall(w=w, **groups, **self._read(kernel))
        packed = array_at(address, (1, size_bytes), size_bytes, np.dtype(np.uint8))[0]
        return _Product(kernel_call=call, y=self._y(kernel), packed=packed)

    def of_activations(self, kernel: Kernel) -> _Product:
        """Return a product whose w is in the call, or attention with its values."""
        args, problem = self.args, kernel.problem
        w_shape = (args.n, problem.k) if problem.operation.has_values else problem.w_shape
        view = ArrayView(args.w, args.w_leading_dimension, args.w_batch_stride, args.w_head_stride)
        w = self._rows(view, w_shape, problem.types.w)
        v = None
        if problem.operation.has_values:
            values = ArrayView(
                args.v, args.v_leading_dimension, args.v_batch_stride, args.v_head_stride
            )
            v = self._rows(values, w_shape, problem.types.w)
        call = KernelCall(w=w, v=v, **self._read(kernel))
        return _Product(kernel_call=call, y=self._y(kernel))

    def _read(self, kernel: Kernel) -> dict[str, Any]:
        """Return what a call reads besides w: its arrays where they lie."""
        args, problem = self.args, kernel.problem
        m, n = args.m, args.n if problem.operation.has_values else problem.n
        x = ArrayView(args.x, args.x_leading_dimension, args.x_batch_stride, args.x_head_stride)
        operands = {}
        for number, one in enumerate(problem.epilogue.operands):
            given, heads = args.operands[number], args.operand_head_strides
            head_stride = heads[number] if heads else 0
            view = ArrayView(
                given.elements, given.leading_dimension, given.batch_stride, head_stride
            )
            is_matrix = one.name in row_operands(problem)
            columns = 1 if one.shape is OperandShape.SCALAR else n
            shape = m if is_matrix else 1, columns
            rows = self._rows(view, shape, problem.operand_type(one))
            operands[one.name] = rows if is_matrix else rows[0]
        return {
            "kernel": kernel,
            "x": self._rows(x, (m, problem.k), problem.types.x),
            "operands": operands,
            "parts": count_parts(kernel),
        }

    def _y(self, kernel: Kernel) -> NDArray[Any]:
        args, problem = self.args, kernel.problem
        view = ArrayView(args.y, args.y_leading_dimension, args.y_batch_stride, args.y_head_stride)
        return self._rows(view, (args.m, problem.y_columns), problem.types.y)

    def _rows(self, view: ArrayView, shape: tuple[int, int], dtype: DType) -> NDArray[Any]:
        elements = NUMPY_TYPES[dtype]
        first = self.batch * view.batch_stride + self.head * view.head_stride
        address = view.address + first * elements.itemsize
        return array_at(address, shape, view.leading_dimension, elements)


def array_at(
    address: int, shape: tuple[int, int], leading_dimension: int, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Return the rows at an address in memory, without a copy."""
    rows, columns = shape
    elements = (max(0, rows - 1) * leading_dimension + columns) if rows else 0
    memory = (ctypes.c_uint8 * (elements * dtype.itemsize)).from_address(address)
    flat = np.ctypeslib.as_array(memory).view(dtype)
    strides = (leading_dimension * dtype.itemsize, dtype.itemsize)
    array: NDArray[Any] = np.lib.stride_tricks.as_strided(flat, shape, strides)
    return array


def smallest(wrong: WrongCall) -> KernelCall | None:
    """Return the smallest call that is wrong by itself, or None if none is.

    What does not matter is zero: rows of x, and rows of w. Weights that the kernel packs anew come
    before those that the model has packed. Each time, the kernel is loaded anew.
    """
    used = wrong.kernel_call.kernel
    for call in _smaller_calls(wrong):
        kernel = load_kernel(used.native.binary, artifact=used.artifact, cpu=detect_cpu())
        alone = replace(call, kernel=kernel)
        if alone.error is not None:
            return alone
    return None


def _smaller_calls(wrong: WrongCall) -> Iterator[KernelCall]:
    whole = wrong.kernel_call
    row, column = (
        int(one) for one in np.unravel_index(np.argmax(wrong.shares), wrong.shares.shape)
    )
    is_wrong = wrong.shares > 1
    rows, columns = np.flatnonzero(is_wrong.any(axis=1)), np.flatnonzero(is_wrong.any(axis=0))
    anew = replace(whole, packed=None)
    yield _with_rows(_with_columns(anew, [column]), [row], least=whole.kernel.problem.m.low)
    yield _with_rows(_with_columns(anew, [column]), [row])
    yield _with_rows(_with_columns(anew, columns), [row])
    yield _with_rows(anew, [row])
    yield _with_rows(anew, rows)
    yield anew
    yield _with_rows(whole, [row], least=whole.kernel.problem.m.low)
    yield _with_rows(whole, [row])
    yield whole


def _with_rows(
    call: KernelCall, rows: Sequence[int] | NDArray[np.intp], least: int | None = None
) -> KernelCall:
    """Return a call with all but some rows zero, or of `least` rows with one of them the last."""
    count = len(call.x) if least is None else max(1, least)

    def kept(array: NDArray[Any]) -> NDArray[Any]:
        zeros = np.zeros((count, *array.shape[1:]), array.dtype)
        zeros[rows if least is None else [count - 1]] = array[rows]
        return zeros

    own = row_operands(call.kernel.problem)
    return replace(
        call,
        x=kept(call.x),
        operands={name: kept(one) if name in own else one for name, one in call.operands.items()},
    )


def _with_columns(call: KernelCall, columns: Sequence[int] | NDArray[np.intp]) -> KernelCall:
    if call.v is not None:
        v = np.zeros_like(call.v)
        v[:, columns] = call.v[:, columns]
        return replace(call, v=v)
    w = np.zeros_like(call.w)
    is_nk = call.kernel.problem.w_layout is WeightLayout.NK
    of_columns = (columns,) if is_nk else (slice(None), columns)
    w[of_columns] = call.w[of_columns]
    return replace(call, w=w)
