"""The fallback when no kernel is served: the same calls as a kernel, by another library."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.arrays.batch import (
    PackedBatch,
    batch_of_weights,
    batched_operands,
    check_batch_overlap,
    products_of,
)
from gemm_tuner.arrays.call import check_batch_call, check_call
from gemm_tuner.arrays.dlpack import AnyArray, SharedArray
from gemm_tuner.arrays.packed import PackedWeights, check_packed
from gemm_tuner.arrays.products import Products, check_packs, check_products, refuse_values
from gemm_tuner.arrays.weights import check_weights
from gemm_tuner.domain.comparison import Comparison
from gemm_tuner.domain.context import check_threads
from gemm_tuner.domain.measurement import Library
from gemm_tuner.domain.problem import Problem
from gemm_tuner.libraries.choose import choose_library
from gemm_tuner.machine.memory import allocate_aligned

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoKernel:
    """Why there is no kernel for a problem, and which library one was compared with, if any.

    `instead` is the library that shall compute: by default the one that was compared with.
    """

    reason: str
    compared_with: Library | None = None
    instead: Library | None = None

    @classmethod
    def of(cls, reason: str, comparison: Comparison | None) -> Self:
        """Return why there is none, with the libraries of a comparison, if there was one."""
        if comparison is None:
            return cls(reason=reason)
        return cls(reason=reason, compared_with=comparison.baseline, instead=comparison.other)

    def fallback(self, problem: Problem, *, threads: int) -> "FallbackKernel":
        """Return what computes the problem instead."""
        return FallbackKernel(
            problem=problem,
            reason=self.reason,
            threads=threads,
            compared_with=self.compared_with,
            instead=self.instead,
        )


class FallbackKernel:
    """A problem computed by a library, and the reason why no kernel does it.

    It is called like a `Kernel`: pack the weights once, then call, from any number of threads; of
    two activations call it as `kernel(x, w)`. The
    library is the one that kernels were compared with, where it is installed and can be called
    here; else the fastest of its race that can, oneDNN, OpenBLAS or NumPy. `library` says what
    computes: `onednn 3.2.0`. `reason` ends with what the comparison was with and, if another
    library computes, why; `refusals` say in full why those do not that were asked before it.
    `compared_with` is None where no kernel was timed.
    """

    def __init__(
        self,
        *,
        problem: Problem,
        reason: str,
        threads: int | None = None,
        compared_with: Library | None = None,
        instead: Library | None = None,
    ) -> None:
        """Choose the library: `instead`, where it is installed, or else the one compared with.

        A call uses `threads` threads if it does not say how many; None leaves it to the library.

        Raises:
            InvalidSetting: `threads` is out of range.
        """
        self._arguments = (problem.text, reason, threads, compared_with, instead)
        self.problem = problem
        self.threads = threads if threads is None else check_threads(threads)
        self.compared_with = compared_with
        chosen = choose_library(problem, threads, compared_with, instead)
        self._layer = chosen.layer
        self.reason = f"{reason} {chosen.remark}".rstrip()
        self.refusals = chosen.refusals

    def __reduce__(self) -> tuple[object, ...]:
        """Return how to make it again, in this process or where it is unpickled."""
        return _make_again, self._arguments

    def __repr__(self) -> str:
        """Return what it computes, and with which library."""
        return f"FallbackKernel({self.problem.text!r}, {self.library!r}, threads={self.threads})"

    def because(self, reason: str) -> "FallbackKernel":
        """Return the same with a sentence more in front of its reason."""
        problem, known, threads, compared_with, instead = self._arguments
        return _make_again(problem, f"{reason} {known}", threads, compared_with, instead)

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
        check_packs(self.problem)
        weights = check_weights(self.problem, w, scales, zero_points)
        return PackedWeights(owner=self.packed_format, memory=self._layer.pack(weights))

    def __call__(
        self,
        x: AnyArray,
        packed: PackedWeights | SharedArray,
        v: object = None,
        *,
        out: AnyArray | None = None,
        threads: int | None = None,
        parts: int | None = None,
        **operands: object,
    ) -> AnyArray:
        """Return `epilogue(x @ w)`; the arguments are those of `Kernel`.

        A library cuts its calls itself, whatever `parts` says.

        Raises:
            InvalidArray: an array is missing, or its type, shape or strides cannot be used.
            InvalidSetting: `threads` or `parts` is out of range.
        """
        if not self.problem.operation.packs_ahead:
            products = check_products(self.problem, x, packed, out, operands, v=v)
            return self._multiply(products, self._wanted_threads(threads, parts))
        refuse_values(self.problem, v)
        check_packed(packed, self.packed_format)
        assert isinstance(packed, PackedWeights)
        wanted = self._wanted_threads(threads, parts)
        arrays = check_call(self.problem, x, out, operands)
        read = list(arrays.operands.arrays.values())
        self._layer.compute(arrays.x, packed.memory, arrays.y, read, wanted)
        return arrays.result

    def _multiply(self, arrays: Products[AnyArray], threads: int | None) -> AnyArray:
        """Return the products of activations, one after the other."""
        if arrays.y.size == 0:
            return arrays.result
        for x, w, y, *read in arrays.each(self.problem.epilogue.operands):
            self._layer.compute(x, w, y, read, threads)
        return arrays.result

    def pack_batch(
        self, w: object, *, scales: object = None, zero_points: object = None
    ) -> PackedBatch:
        """Return a copy of the weights of each product; the arguments are `Kernel.pack_batch`'s.

        Raises:
            InvalidArray: an array is missing or not wanted, or its type, shape or strides cannot
                be used.
        """
        check_packs(self.problem)
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
        parts: int | None = None,
        **operands: object,
    ) -> AnyArray:
        """Return `epilogue(x @ w)` for each product; the arguments are those of `Kernel.batch`.

        Raises:
            InvalidArray: an array is missing, or its type, shape or strides cannot be used.
            InvalidSetting: `threads` or `parts` is out of range.
        """
        check_packs(self.problem)
        given, y, result = check_batch_call(self.problem, x, out)
        count = len(given)
        if isinstance(packed, PackedBatch):
            packed.check(self.packed_format, count)
            weights = [
                PackedWeights(owner=self.packed_format, memory=one) for one in packed.products
            ]
        else:
            weights = [packed] * count
        epilogue = self.problem.epilogue
        if out is not None:
            check_batch_overlap(y, given, batched_operands(epilogue.operands, operands, count))
        products = products_of(epilogue.operands, operands, count)
        for one_x, one_w, one_y, its_operands in zip(given, weights, y, products, strict=True):
            self(one_x, one_w, out=one_y, threads=threads, parts=parts, **its_operands)
        return result

    @property
    def packed_format(self) -> str:
        """Return the name of the layout of packed weights, which is shared with no other."""
        threads = "" if self.threads is None else f" in {self.threads} threads"
        return f"{self._layer.layout} for {self.problem.text}{threads}"

    def _wanted_threads(self, threads: int | None, parts: int | None) -> int | None:
        if parts is not None:
            check_threads(parts, "parts")
        return self.threads if threads is None else check_threads(threads)


def _make_again(
    problem: str,
    reason: str,
    threads: int | None,
    compared_with: Library | None,
    instead: Library | None,
) -> FallbackKernel:
    return FallbackKernel(
        problem=Problem.parse(problem),
        reason=reason,
        threads=threads,
        compared_with=compared_with,
        instead=instead,
    )


def _stacked(copies: list[Array]) -> Array:
    """Return arrays one behind the other in aligned memory."""
    if not copies:
        return np.empty((0, 0, 0))
    memory = allocate_aligned(sum(copy.nbytes for copy in copies)).view(copies[0].dtype)
    return np.stack(copies, out=memory.reshape(len(copies), *copies[0].shape))
