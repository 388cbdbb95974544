"""The fallback when no kernel is served: the same calls as a kernel, by another library."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.batch import (
    PackedBatch,
    batch_of,
    batch_of_weights,
    batched_operands,
    check_batch_overlap,
    check_batch_shapes,
    products_of,
)
from gemm_tuner.arrays.dlpack import AnyArray, as_array, new_result
from gemm_tuner.arrays.packed import PackedWeights, check_packed
from gemm_tuner.arrays.views import (
    NUMPY_TYPES,
    check_operand_names,
    check_overlap,
    count_rows,
    view_matrix,
    view_operand,
    view_output,
)
from gemm_tuner.arrays.weights import check_weights
from gemm_tuner.domain.context import check_threads
from gemm_tuner.domain.measurement import Library
from gemm_tuner.domain.problem import Problem
from gemm_tuner.libraries.choose import choose_library
from gemm_tuner.machine.memory import allocate_aligned

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoKernel:
    """Why there is no kernel for a problem, and which library one was compared with, if any."""

    reason: str
    compared_with: Library | None = None


class FallbackKernel:
    """A problem computed by a library, and the reason why no kernel does it.

    It is called like a `Kernel`: pack the weights once, then call, from any number of threads. The
    library is the one that kernels were compared with, where it is installed and can be called
    here; else oneDNN, OpenBLAS or NumPy. `library` says what computes: `onednn 3.2.0`. `reason`
    ends with what the comparison was with and, if another library computes, why.
    """

    def __init__(
        self,
        *,
        problem: Problem,
        reason: str,
        threads: int | None = None,
        compared_with: Library | None = None,
    ) -> None:
        """Choose the library.

        A call uses `threads` threads if it does not say how many; None leaves it to the library.

        Raises:
            InvalidSetting: `threads` is out of range.
        """
        self.problem = problem
        self.threads = threads if threads is None else check_threads(threads)
        chosen = choose_library(problem, threads, compared_with)
        self._layer = chosen.layer
        self.reason = f"{reason} {chosen.remark}".rstrip()

    def __repr__(self) -> str:
        """Return what it computes, and with which library."""
        return f"FallbackKernel({self.problem.text!r}, {self.library!r}, threads={self.threads})"

    @property
    def library(self) -> str:
        """Return the name and version of the library that computes."""
        return self._layer.text

    def pack(
        self, w: object, *, scales: object = None, zero_points: object = None
    ) -> PackedWeights:
        """Return a copy of the weights, ready to be multiplied; the arguments are `Kernel.pack`'s.

        Raises:
            InvalidArray: an array is missing or not wanted, or its type, shape or strides cannot
                be used.
        """
        weights = check_weights(self.problem, w, scales, zero_points)
        return PackedWeights(owner=self.packed_format, memory=self._layer.pack(weights))

    def __call__(
        self,
        x: AnyArray,
        packed: PackedWeights,
        *,
        out: AnyArray | None = None,
        threads: int | None = None,
        **operands: object,
    ) -> AnyArray:
        """Return `epilogue(x @ w)`; the arguments are those of `Kernel`.

        Raises:
            InvalidArray: an array is missing, or its type, shape or strides cannot be used.
            InvalidSetting: `threads` is out of range.
        """
        problem = self.problem
        check_packed(packed, self.packed_format)
        wanted = self._wanted_threads(threads)
        given = as_array("x", x)
        shape = (count_rows(given, problem), problem.n)
        view_matrix("x", given, (shape[0], problem.k), problem.types.x)
        arrays = self._operand_arrays(operands, shape)
        result = new_result(x, shape, NUMPY_TYPES[problem.types.y]) if out is None else out
        y = as_array("out", result)
        view_output(y, shape, problem.types.y)
        assert isinstance(y, np.ndarray)
        assert isinstance(given, np.ndarray)
        if out is not None:
            names = [operand.name for operand in problem.epilogue.operands]
            for name, array in zip(("x", *names), (given, *arrays), strict=True):
                check_overlap(y, name, array)
        self._layer.compute(given, packed.memory, y, arrays, wanted)
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
        return PackedBatch(packer=self.packed_format, products=_stacked(copies))

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
            InvalidSetting: `threads` is out of range.
        """
        given = batch_of("x", x, "(batch, m, k)")
        count = len(given)
        if isinstance(packed, PackedBatch):
            packed.check(self.packed_format, count)
            weights = [
                PackedWeights(owner=self.packed_format, memory=one) for one in packed.products
            ]
        else:
            weights = [packed] * count
        shape = (count, given.shape[1], self.problem.n)
        result = new_result(x, shape, NUMPY_TYPES[self.problem.types.y]) if out is None else out
        y = batch_of("out", result, f"of the shape {shape}")
        check_batch_shapes(given, y, self.problem)
        epilogue = self.problem.epilogue
        if out is not None:
            check_batch_overlap(y, given, batched_operands(epilogue.operands, operands, count))
        products = products_of(epilogue.operands, operands, count)
        for one_x, one_w, one_y, its_operands in zip(given, weights, y, products, strict=True):
            self(one_x, one_w, out=one_y, threads=threads, **its_operands)
        return result

    @property
    def packed_format(self) -> str:
        """Return the name of the layout of packed weights, which is shared with no other."""
        threads = "" if self.threads is None else f" in {self.threads} threads"
        return f"{self._layer.layout} for {self.problem.text}{threads}"

    def _wanted_threads(self, threads: int | None) -> int | None:
        return self.threads if threads is None else check_threads(threads)

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


def _stacked(copies: list[Array]) -> Array:
    """Return arrays one behind the other in aligned memory."""
    if not copies:
        return np.empty((0, 0, 0))
    memory = allocate_aligned(sum(copy.nbytes for copy in copies)).view(copies[0].dtype)
    return np.stack(copies, out=memory.reshape(len(copies), *copies[0].shape))
