"""Choose the library that computes a layer: what kernels were compared with, or else the best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from gemm_tuner.arrays.weights import StoredWeights
from gemm_tuner.domain.comparison import InProcess
from gemm_tuner.domain.dtype import F32
from gemm_tuner.domain.measurement import Library
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.attention_layer import AttentionLayer, ProductLayer
from gemm_tuner.libraries.fixed_order import FixedOrderLayer
from gemm_tuner.libraries.numpy_layer import NumpyLayer
from gemm_tuner.libraries.onednn import installed_onednn
from gemm_tuner.libraries.onednn_layer import OneDnnLayer
from gemm_tuner.libraries.openblas_layer import OpenBlasLayer

Array = NDArray[Any]


class LibraryLayer(Protocol):
    """A problem computed by a library.

    `text` is the library's name and version. Packed weights are for layers of the same `layout`. Of
    two activations nothing is packed: `compute` gets w as the caller stores it.
    """

    text: str

    @property
    def layout(self) -> str:
        """Return the name of the layout of packed weights, for this problem."""

    def pack(self, weights: StoredWeights) -> Array:
        """Return a copy of the weights in the layout of the library."""

    def compute(
        self, x: Array, packed: Array, y: Array, operands: Sequence[Array], threads: int | None
    ) -> None:
        """Write `epilogue(x @ w)` to y; the operands are in the order of the epilogue."""


class _Layer(LibraryLayer, ProductLayer, Protocol):
    """A layer of a product, of which attention may be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A layer, and a remark on the choice, or none.

    `refusals` say of each library that was asked before, by its name, why it does not compute.
    """

    layer: LibraryLayer
    remark: str
    refusals: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A library: its name, and how a layer of it is made.

    `make(problem, threads, package)` takes the installed package of this name, or else the first,
    and raises `BaselineMissing` where it cannot compute the problem.
    """

    name: str
    make: Callable[[Problem, int | None, str], _Layer]


def _make_onednn(problem: Problem, threads: int | None, package: str) -> _Layer:
    # Only found libraries are loaded: what a package is called may come from another machine.
    named = [one.path for one in installed_onednn() if one.package == package]
    return OneDnnLayer(problem, threads, named[0] if named else None)


_ROWS: dict[str, _Row] = {
    InProcess.ONEDNN: _Row(name="oneDNN", make=_make_onednn),
    InProcess.OPENBLAS: _Row(
        name="OpenBLAS", make=lambda problem, _threads, _package: OpenBlasLayer(problem)
    ),
}


def choose_library(
    problem: Problem,
    threads: int | None,
    compared_with: Library | None,
    instead: Library | None = None,
) -> Chosen:
    """Return the layer by the library that is wanted, if it is here, or by the preferred one.

    Wanted is `instead`, or else what was compared with. No library promises an order of additions:
    a fixed one is computed by its definition.

    Raises:
        BaselineMissing: the order is fixed, and its definition was not built with the package.
    """
    if problem.is_fixed:
        fixed = FixedOrderLayer(problem)
        return Chosen(layer=fixed, remark=_slowly(fixed, compared_with), refusals={})
    preferred = _preferred(problem)
    wanted = instead or compared_with or Library(text=preferred[0])
    word = wanted.name
    refusals: dict[str, BaselineMissing] = {}
    layer: LibraryLayer | None = None
    of_wanted = [(one, wanted.package) for one in _ROWS if one == word]
    for one, package in dict.fromkeys([*of_wanted, *((one, "") for one in preferred)]):
        try:
            layer = _layer_of(problem, partial(_make, one, threads, package))
        except BaselineMissing as refusal:
            refusals.setdefault(one, refusal)
        else:
            break
    layer = layer or _layer_of(problem, NumpyLayer)
    return Chosen(
        layer=layer,
        remark=_remark(layer, compared_with, word, refusals.get(word)),
        refusals={
            _ROWS[one].name: "\n".join((str(refusal), *refusal.details))
            for one, refusal in refusals.items()
        },
    )


def _preferred(problem: Problem) -> Sequence[str]:
    """Return the libraries, the one first that is the fastest where nothing was timed.

    Of two activations oneDNN packs none, and each call of it costs more: on a Zen 3, OpenBLAS takes
    from 0.06 to 1.03 of its time where no pass follows, and from 0.1 to 0.9 for one row with a
    pass. For more rows, the pass costs more than that.
    """
    has_pass = bool(problem.epilogue.steps) or problem.types != F32
    is_quick = not has_pass or (problem.m.high == 1 and problem.types == F32)
    if is_quick and not problem.operation.packs_ahead:
        return (InProcess.OPENBLAS, *(one for one in _ROWS if one != InProcess.OPENBLAS))
    return tuple(_ROWS)


def _make(name: str, threads: int | None, package: str, problem: Problem) -> _Layer:
    return _ROWS[name].make(problem, threads, package)


def _layer_of(problem: Problem, make: Callable[[Problem], _Layer]) -> LibraryLayer:
    """Return the layer of a product, or those of attention, by one library."""
    return AttentionLayer(problem, make) if problem.operation.has_values else make(problem)


def _slowly(fixed: FixedOrderLayer, compared_with: Library | None) -> str:
    compared = f"The comparison was with {compared_with.text}. " if compared_with else ""
    return (
        f"{compared}No library promises an order of additions, so {fixed.text} computes, which is "
        "slow."
    )


def _remark(
    layer: LibraryLayer,
    compared_with: Library | None,
    word: str,
    refusal: BaselineMissing | None,
) -> str:
    if compared_with is None:
        return f"{layer.text} computes instead of {_ROWS[word].name}: {refusal}" if refusal else ""
    said = f"The comparison was with {compared_with.text}"
    if compared_with.is_version_of(layer.text):
        return f"{said}."
    if refusal:
        return f"{said}. {layer.text} computes instead: {refusal}"
    is_called = compared_with.name in _ROWS
    why = "which is not installed here" if is_called else "which is not called from here"
    return f"{said}, {why}: {layer.text} computes instead."
