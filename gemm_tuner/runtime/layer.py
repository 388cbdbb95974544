"""A linear layer for many batch sizes: kernels that share packed copies of the weights."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.dlpack import AnyArray, as_array, new_result
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.packed import PackedWeights
from gemm_tuner.arrays.views import check_overlap
from gemm_tuner.domain.epilogue import OperandShape
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.rows import Rows
from gemm_tuner.errors import InvalidArray
from gemm_tuner.libraries.fallback import FallbackKernel, NoKernel
from gemm_tuner.runtime.load import Kernel

_WITH_ROWS = {OperandShape.COLUMN_VECTOR, OperandShape.MATRIX}

# Reading the weights takes as long as computing about this many rows: 1.4 ms, and 0.13 ms a row,
# for f32 4096x4096 from L3 and memory (AMD EPYC, Zen 5, one thread, November 2026).
_ROWS_OF_A_PASS = 10

AnyKernel = Kernel | FallbackKernel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayer:
    """The weights of a layer, packed once in each format that its kernels read."""

    copies: Mapping[str, PackedWeights]

    @property
    def size_bytes(self) -> int:
        """Return the size of all copies."""
        return sum(copy.memory.nbytes for copy in self.copies.values())


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows of a call from `start` to before `stop`, and the kernel that computes them."""

    kernel: AnyKernel
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """Return the rows, to cut an array."""
        return slice(self.start, self.stop)

    @property
    def cost(self) -> int:
        """Return its predicted time, in units of computing one row."""
        return self.stop - self.start + _ROWS_OF_A_PASS


class Layer:
    """One n and k for several m: pack the weights once, then call with any number of rows.

    A call runs the kernel for its number of rows, or else for the narrowest range that holds it.
    Another number is computed in pieces, those for the most rows first; the last may compute some
    rows again where that saves passes over the weights: with m = 1, 4 and 16, 37 rows are 16, 16,
    4 and 1, and 31 are twice 16. Any number of threads may call it.
    """

    def __init__(self, kernels: Sequence[AnyKernel]) -> None:
        """Take kernels for problems that differ in m alone, at least one."""
        self.kernels = tuple(kernels)
        self.problem = kernels[0].problem
        self._whole: dict[int, tuple[_Piece]] = {}  # the calls that are one piece

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the formats in which the weights are packed, each once."""
        return tuple(dict.fromkeys(kernel.packed_format for kernel in self.kernels))

    def pack(self, w: object, *, scales: object = None, zero_points: object = None) -> PackedLayer:
        """Return the weights in each of `formats`; the arguments are `Kernel.pack`'s.

        Raises:
            InvalidArray: an array is missing or not wanted, or its type, shape or strides cannot
                be used.
        """
        packers = {kernel.packed_format: kernel for kernel in reversed(self.kernels)}
        return PackedLayer(
            copies={
                name: packers[name].pack(w, scales=scales, zero_points=zero_points)
                for name in self.formats
            }
        )

    def __call__(
        self,
        x: AnyArray,
        packed: PackedLayer,
        *,
        out: AnyArray | None = None,
        threads: int | None = None,
        parts: int | None = None,
        **operands: object,
    ) -> AnyArray:
        """Return `epilogue(x @ w)`; the arguments are those of `Kernel`, but for `packed`.

        Raises:
            InvalidArray: an array is missing, or its type, shape or strides cannot be used; or
                there is no kernel for so many rows, nor for some to make them up.
            InvalidSetting: `threads` or `parts` is out of range.
        """
        pieces = self._pieces_of(x)
        if len(pieces) == 1:
            kernel = pieces[0].kernel
            return kernel(
                x, _copy_for(kernel, packed), out=out, threads=threads, parts=parts, **operands
            )
        given = _with_rows("x", x, pieces)
        shape = (len(given), self.problem.n)
        result = new_result(x, shape, NUMPY_TYPES[self.problem.types.y]) if out is None else out
        y = _with_rows("out", result, pieces)
        cut = {
            operand.name: _with_rows(operand.name, operands[operand.name], pieces)
            for operand in self.problem.epilogue.operands
            if operand.shape in _WITH_ROWS and operand.name in operands
        }
        for name, array in {"x": given, **cut}.items():
            check_overlap(y, name, array)
        for piece in pieces:
            piece.kernel(
                given[piece.rows],
                _copy_for(piece.kernel, packed),
                out=y[piece.rows],
                threads=threads,
                parts=parts,
                **{**operands, **{name: array[piece.rows] for name, array in cut.items()}},
            )
        return result

    def _pieces_of(self, x: object) -> Sequence[_Piece]:
        shape: tuple[int, ...] = getattr(x, "shape", ())
        if len(shape) != 2:
            raise InvalidArray("x must be an array of two dimensions, (m, k).")
        rows = int(shape[0])
        if rows in self._whole:
            return self._whole[rows]
        pieces = self._cut(rows)
        if len(pieces) == 1:
            self._whole[rows] = (pieces[0],)
        return pieces

    def _cut(self, rows: int) -> Sequence[_Piece]:
        """Return pieces that hold each row at least once: the last may reach back over others."""
        pieces, is_whole = self._largest_first(rows)
        costs = list(accumulate((piece.cost for piece in pieces), initial=0))
        best = (costs[-1], pieces) if is_whole else (inf, [])
        for count, cost in enumerate(costs):
            start = pieces[count - 1].stop if count else 0
            last = self._piece_from(start, rows)
            if last and cost + last.cost < best[0]:
                best = (cost + last.cost, [*pieces[:count], last])
        if best[0] == inf:
            known = ", ".join(one.problem.m.text for one in self.kernels)
            raise InvalidArray(
                f"x has {rows} rows, too few for the kernels for m = {known}; "
                "ask for a layer with m = 1, or with a range of m, too."
            )
        return best[1]

    def _largest_first(self, rows: int) -> tuple[list[_Piece], bool]:
        """Return pieces that hold each row once, as far as they go, and whether that is all."""
        pieces: list[_Piece] = []
        done = 0
        while done < rows:
            smaller = [one for one in self.kernels if 0 < one.problem.m.high <= rows - done]
            if not smaller:
                break
            kernel = max(smaller, key=lambda one: (one.problem.m.high, one.problem.m.low))
            pieces.append(_Piece(kernel, done, done + kernel.problem.m.high))
            done = pieces[-1].stop
        return pieces, done == rows

    def _piece_from(self, start: int, rows: int) -> _Piece | None:
        """Return the smallest piece that holds the rows from `start` on, if there is one."""
        rest = rows - start
        fitting = [
            (max(rest, one.problem.m.low), one.problem.m.high - one.problem.m.low, place)
            for place, one in enumerate(self.kernels)
            if rest <= one.problem.m.high and one.problem.m.low <= rows
        ]
        if not fitting:
            return None
        size, _width, place = min(fitting)
        return _Piece(self.kernels[place], rows - size, rows)


def make_layer(
    problems: Sequence[Problem], found: Sequence[Kernel | NoKernel], *, threads: int
) -> Layer:
    """Return the layer of the kernels found for problems that differ in m alone.

    Where `found` holds none, one library computes all such m from one copy: the one that most of
    them were compared with.
    """
    kernels: list[AnyKernel] = [one for one in found if isinstance(one, Kernel)]
    without = {
        problem.m: one
        for problem, one in zip(problems, found, strict=True)
        if isinstance(one, NoKernel)
    }
    if without:
        rows = Rows(low=min(rows.low for rows in without), high=max(rows.high for rows in without))
        compared = Counter(
            (one.compared_with, one.instead) for one in without.values() if one.compared_with
        )
        compared_with, instead = next((one for one, _n in compared.most_common(1)), (None, None))
        reason = " ".join(dict.fromkeys(one.reason for one in without.values()))
        of_all = NoKernel(reason=reason, compared_with=compared_with, instead=instead)
        kernels.append(of_all.fallback(replace(problems[0], m=rows), threads=threads))
    return Layer(kernels)


def _copy_for(kernel: AnyKernel, packed: object) -> PackedWeights:
    if not isinstance(packed, PackedLayer):
        raise InvalidArray(
            f"packed is a {type(packed).__name__}, not a packed layer: pass layer.pack(w)."
        )
    copy = packed.copies.get(kernel.packed_format)
    if copy is None:
        raise InvalidArray(
            f"packed has no copy in the format {kernel.packed_format!r}: "
            "pack the weights with this layer."
        )
    return copy


def _with_rows(name: str, value: object, pieces: Sequence[_Piece]) -> NDArray[np.generic]:
    """Return the array broadcast to all rows, so that it can be cut into pieces."""
    rows = pieces[-1].stop if pieces else 0
    array = as_array(name, value)
    if not isinstance(array, np.ndarray) or array.ndim < 1 or len(array) != rows:
        raise InvalidArray(
            f"{name} has the shape {getattr(array, 'shape', 'of no array')}, but x has {rows} rows."
        )
    return array
