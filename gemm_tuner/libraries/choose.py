"""Choose the library that computes a layer: what kernels were compared with, or else the best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from gemm_tuner.arrays.weights import StoredWeights
from gemm_tuner.domain.measurement import Library
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.numpy_layer import NumpyLayer
from gemm_tuner.libraries.onednn import installed_onednn
from gemm_tuner.libraries.onednn_layer import OneDnnLayer
from gemm_tuner.libraries.openblas_layer import OpenBlasLayer

Array = NDArray[Any]


class LibraryLayer(Protocol):
    """A problem computed by a library.

    `text` is the library's name and version. Packed weights are for layers of the same `layout`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A layer, and remarks on the choice in sentences, or none."""

    layer: LibraryLayer
    remark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A library: the first word of its text, its name, and how a layer of it is made.

    `make(problem, threads, package)` takes the installed package of this name, or else the first,
    and raises `BaselineMissing` where it cannot compute the problem.
    """

    word: str
    name: str
    make: Callable[[Problem, int | None, str], LibraryLayer]


def _make_onednn(problem: Problem, threads: int | None, package: str) -> LibraryLayer:
    # Only found libraries are loaded: what a package is called may come from another machine.
    named = [one.path for one in installed_onednn() if one.package == package]
    return OneDnnLayer(problem, threads, named[0] if named else None)


# The best first, as far as one can say without timing them.
_ROWS = (
    _Row(word="onednn", name="oneDNN", make=_make_onednn),
    _Row(
        word="openblas",
        name="OpenBLAS",
        make=lambda problem, _threads, _package: OpenBlasLayer(problem),
    ),
)
_NUMPY = "NumPy"


def choose_library(problem: Problem, threads: int | None, compared_with: Library | None) -> Chosen:
    """Return the layer by the library that was compared with, if it is here, or by the best.

    The remark says which library that was and, where another computes, why.
    """
    word = compared_with.text.partition(" ")[0] if compared_with else _ROWS[0].word
    package = compared_with.package if compared_with else ""
    refusals: dict[str, str] = {}
    named = [(row, package) for row in _ROWS if row.word == word]
    for row, wanted in dict.fromkeys([*named, *((row, "") for row in _ROWS)]):
        try:
            layer = row.make(problem, threads, wanted)
        except BaselineMissing as refusal:
            refusals.setdefault(row.word, str(refusal))
            continue
        return Chosen(layer=layer, remark=_remark(row.name, layer, word, refusals, compared_with))
    numpy = NumpyLayer(problem)
    return Chosen(layer=numpy, remark=_remark(_NUMPY, numpy, word, refusals, compared_with))


def _remark(
    name: str,
    layer: LibraryLayer,
    word: str,
    refusals: dict[str, str],
    compared_with: Library | None,
) -> str:
    names = {row.word: row.name for row in _ROWS}
    if compared_with is None:
        return f"{name} computes instead of {names[word]}: {refusals[word]}" if refusals else ""
    said = f"The comparison was with {compared_with.text}"
    if compared_with.is_version_of(layer.text):
        return f"{said}."
    if word in refusals:
        return f"{said}. {layer.text} computes instead: {refusals[word]}"
    why = "which is not installed here" if word in names else "which is not called from here"
    return f"{said}, {why}: {layer.text} computes instead."
