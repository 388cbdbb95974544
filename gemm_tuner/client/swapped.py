"""A kernel that takes the place of a library while threads call it."""

from collections.abc import Callable
from threading import Lock
from typing import Any, Never

import numpy as np

from gemm_tuner.arrays.batch import PackedBatch
from gemm_tuner.arrays.dlpack import AnyArray, SharedArray, as_array
from gemm_tuner.arrays.packed import PackedWeights
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray, InvalidSetting
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.forks import tell_of_forks
from gemm_tuner.runtime.load import Kernel

AnyKernel = Kernel | FallbackKernel
_Packed = PackedWeights | PackedBatch
_Pack = Callable[[AnyKernel], _Packed]


class SwappedWeights:
    """Weights packed for what computes now, and packed again once for the kernel that follows.

    Until then they are in memory twice: packed, and a copy as they were given.
    """

    __slots__ = ("__weakref__", "_again", "_lock", "_made", "owner")

    def __init__(
        self, owner: object, kernel: AnyKernel, packed: _Packed, again: _Pack | None
    ) -> None:
        self.owner = owner
        self._made = (kernel, packed)
        self._again = again
        self._lock = Lock()
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Make the lock anew: a thread that packs again does so in another process."""
        self._lock = Lock()

    def __reduce__(self) -> Never:
        """Refuse to be copied or pickled.

        Raises:
            InvalidSetting: always.
        """
        raise InvalidSetting(
            "packed weights cannot be copied or pickled while their kernel may be tuned: pack the "
            "weights again, in each process for itself."
        )

    def newest(self, kernel: AnyKernel, *, is_last: bool) -> tuple[AnyKernel, _Packed]:
        """Return what computes and the weights in its layout: those of `kernel`, if it can be.

        One thread packs them again; others go on meanwhile with what they have.
        """
        made = self._made  # both at once: no kernel gets the weights of another
        again = self._again
        if again is None:
            return made
        if made[0] is kernel:
            if is_last:
                self._again = None
            return made
        if not self._lock.acquire(blocking=False):
            return made
        try:
            # For good, another thread may have been faster, and this one's `kernel` be older.
            if self._again is not None and self._made[0] is not kernel:
                self._made = (kernel, again(kernel))
            if is_last:
                self._again = None
        except MemoryError:  # what is packed already still computes
            self._again = None
        finally:
            self._lock.release()
        return self._made


class SwappedKernel:
    """A problem that a library computes until its kernel was tuned, and then that kernel.

    It is called like a `Kernel`: pack the weights once, then call, from any number of threads; of
    two activations call it as `kernel(x, w)`.
    Weights that were packed before go on to work: at the next call with them, they are packed again
    for the kernel. Until then a copy of them is kept as they were given, so that they take twice
    the memory, and three times while they are packed again. No call mixes the two. The result of a
    call may change in its last bits when the kernel comes.

    `library` and `reason` say what computes now, and why; `is_settled` whether that stays so.
    """

    def __init__(self, kernel: AnyKernel, note: str) -> None:
        self.problem: Problem = kernel.problem
        self._state = (kernel, note, False)

    def __reduce__(self) -> Never:
        """Refuse to be copied or pickled.

        Raises:
            InvalidSetting: always.
        """
        raise InvalidSetting(
            f"the kernel for {self.problem.text!r} cannot be copied or pickled while it may be "
            "tuned: any number of threads may share it, and another process asks for its own."
        )

    def __repr__(self) -> str:
        """Return what computes now."""
        return f"SwappedKernel({self._state[0]!r})"

    @property
    def kernel(self) -> AnyKernel:
        """Return what computes now."""
        return self._state[0]

    @property
    def is_settled(self) -> bool:
        """Return whether what computes will not change any more."""
        return self._state[2]

    @property
    def library(self) -> str:
        """Return the name and version of what computes now."""
        return self.kernel.library

    @property
    def reason(self) -> str:
        """Return why that computes now, and what became of the tuning."""
        kernel, note, _is_settled = self._state
        return f"{note} {kernel.reason}".strip()

    @property
    def threads(self) -> int | None:
        """Return how many threads share a call that does not say it."""
        return self.kernel.threads

    def settle(self, kernel: AnyKernel, note: str = "") -> None:
        """Let `kernel` compute from the next call on, for good."""
        self._state = (kernel, note, True)

    def pack(
        self, w: object, *, scales: object = None, zero_points: object = None
    ) -> SwappedWeights:
        """Return a copy of the weights; the arguments are those of `Kernel.pack`.

        Raises:
            InvalidArray: an array is missing or not wanted, or its type, shape or strides cannot
                be used.
        """
        return self._packed(lambda kernel, arrays: kernel.pack(**arrays), w, scales, zero_points)

    def pack_batch(
        self, w: object, *, scales: object = None, zero_points: object = None
    ) -> SwappedWeights:
        """Return the weights of each product; the arguments are those of `Kernel.pack_batch`.

        Raises:
            InvalidArray: an array is missing or not wanted, or its type, shape or strides cannot
                be used.
        """
        return self._packed(
            lambda kernel, arrays: kernel.pack_batch(**arrays), w, scales, zero_points
        )

    def __call__(
        self,
        x: AnyArray,
        packed: SwappedWeights | SharedArray,
        v: object = None,
        *,
        out: AnyArray | None = None,
        threads: int | None = None,
        parts: int | None = None,
        **operands: object,
    ) -> AnyArray:
        """Return `epilogue(x @ w)`; the arguments are those of `Kernel`.

        Raises:
            InvalidArray: an array is missing, or its type, shape or strides cannot be used.
            InvalidSetting: `threads` or `parts` is out of range.
        """
        kernel, weights = self._newest(packed)
        values = () if v is None else (v,)
        return kernel(x, weights, *values, out=out, threads=threads, parts=parts, **operands)

    def batch(
        self,
        x: AnyArray,
        packed: SwappedWeights,
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
        kernel, weights = self._newest(packed)
        return kernel.batch(x, weights, out=out, threads=threads, parts=parts, **operands)

    def _packed(
        self,
        pack: Callable[[AnyKernel, dict[str, Any]], _Packed],
        w: object,
        scales: object,
        zero_points: object,
    ) -> SwappedWeights:
        kernel, _note, is_settled = self._state
        given = {"w": w, "scales": scales, "zero_points": zero_points}
        packed = pack(kernel, given)
        if is_settled:
            return SwappedWeights(self, kernel, packed, None)
        copies = {
            name: None if array is None else np.array(as_array(name, array), order="C")
            for name, array in given.items()
        }
        return SwappedWeights(self, kernel, packed, lambda newer: pack(newer, copies))

    def _newest(self, packed: object) -> tuple[AnyKernel, Any]:
        """Return what computes, and the weights for it, or w as it was given with the call."""
        if not self.problem.operation.packs_ahead:
            return self.kernel, packed
        if not isinstance(packed, SwappedWeights) or packed.owner is not self:
            raise InvalidArray(
                f"packed is a {type(packed).__name__} that was not packed by this kernel: pass "
                "what its pack or pack_batch returned."
            )
        kernel, _note, is_settled = self._state
        return packed.newest(kernel, is_last=is_settled)
