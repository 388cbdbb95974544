"""Each call of a kernel in a model beside the exact result of what it read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.dlpack import as_array
from gemm_tuner.bench.reproduce import KernelCall, row_operands
from gemm_tuner.bench.tolerance import find_error, shares_of_bounds
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.torch.operators import OperatorLayer, PlacedKernel, count_parts
from gemm_tuner.torch.watching import OperatorCall


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownLayer:
    """A layer of a model, its kernels, and its weights (n, k) as they are now."""

    name: str
    layer: OperatorLayer
    w: Any


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

    def __init__(self, known: Callable[[OperatorCall], KnownLayer | None]) -> None:
        """Take what finds the layer that a call is of."""
        self._known = known
        self.errors: dict[str, LayerError] = {}
        self.first_wrong: WrongCall | None = None
        self.kernels: dict[str, Kernel] = {}
        self.unknown = 0

    def see(self, call: OperatorCall) -> Any:  # noqa: ANN401 - a tensor
        """Judge a call, and return what it computed."""
        self._judge(call)
        return call.y

    def correct(self, call: OperatorCall) -> Any:  # noqa: ANN401 - a tensor
        """Return the exact result of a call, rounded to the type of y."""
        products = self._products(call)
        if not products:
            return call.y
        values = np.stack([one.kernel_call.expected.values for one in products])
        return call.y.new_tensor(values).reshape(call.y.shape)

    def _products(self, call: OperatorCall) -> list["_Product"]:
        """Return the products of a call: several of a batch; none if its kernel is not known."""
        known = self._known(call)
        if known is None:
            return []
        is_batch = call.packed.dim() == 2
        rows = call.x.shape[1] if is_batch else call.x.numel() // call.x.shape[-1]
        placed = known.layer.kernel_for(rows)
        if placed is None:
            return []
        if not is_batch:
            return [_product(placed, call, known.w)]
        return [
            _product(placed, _one_of_batch(call, place), known.w[place])
            for place in range(len(call.packed))
        ]

    def _judge(self, call: OperatorCall) -> None:
        known, products = self._known(call), self._products(call)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Product:
    """One product: the call of its kernel, what it computed, and its weights as they are packed."""

    kernel_call: KernelCall
    y: NDArray[Any]
    packed: NDArray[np.uint8]

    @property
    def held(self) -> KernelCall:
        """Return its call with copies of its arrays, which the model may write to after it."""
        call = self.kernel_call
        return replace(
            call,
            x=call.x.copy(),
            w=call.w.copy(),
            operands={name: one.copy() for name, one in call.operands.items()},
            packed=self.packed.copy(),
        )


def _one_of_batch(call: OperatorCall, place: int) -> OperatorCall:
    has_own_bias = call.bias is not None and call.bias.dim() == 2
    return replace(
        call,
        x=call.x[place],
        packed=call.packed[place],
        bias=call.bias[place] if has_own_bias else call.bias,
        other=None if call.other is None else call.other[place],
        y=call.y[place],
    )


def _product(placed: PlacedKernel, call: OperatorCall, w: Any) -> _Product:  # noqa: ANN401
    problem = placed.kernel.problem
    given = {"bias": call.bias, "add": call.other}
    names = [one.name for one in problem.epilogue.operands]
    operands = {name: _matrix(name, given[name]) for name in names}
    for name in set(names) - row_operands(problem):
        operands[name] = operands[name][0]
    end = placed.packed_offset + placed.kernel.native.packed_weight_bytes
    return _Product(
        kernel_call=KernelCall(
            kernel=placed.kernel,
            x=_matrix("x", call.x),
            w=_matrix("w", w),
            operands=operands,
            parts=count_parts(placed.kernel),
        ),
        y=_matrix("y", call.y),
        packed=_matrix("packed", call.packed[placed.packed_offset : end])[0],
    )


def _matrix(name: str, tensor: Any) -> NDArray[Any]:  # noqa: ANN401 - a tensor
    """Return the rows of a tensor (..., columns), without a copy where they lie so."""
    rows = tensor.detach().contiguous()
    array: NDArray[Any] = np.asarray(as_array(name, rows.reshape(-1, rows.shape[-1])))
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
    w = np.zeros_like(call.w)
    w[columns] = call.w[columns]
    return replace(call, w=w)
