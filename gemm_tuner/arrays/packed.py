"""Packed weights: w in the layout of a kernel, given at each call to it or to one like it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.errors import InvalidArray


class PackedWeights(NamedTuple):
    """Weights in the layout that `owner` names: the `packed_format` of kernels, or one kernel."""

    # A tuple, because native/kernel_call.c reads both at each call: to find two attributes takes
    # 26 ns more (AMD EPYC, Zen 4).
    owner: str
    memory: NDArray[np.generic]

    def __eq__(self, other: object) -> bool:
        return self is other  # not element by element, as tuples are compared

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def check_owner(self, owner: str) -> None:
        """Check that the weights have the layout that the kernel reads.

        Raises:
            InvalidArray: they are packed in another layout.
        """
        if self.owner != owner:
            raise InvalidArray(
                f"packed has the layout {self.owner!r}, but this kernel reads {owner!r}: "
                "pack the weights with this kernel."
            )


def check_packed(packed: object, owner: str) -> None:
    """Check that what a caller gives as packed weights is that, and lies as a kernel needs.

    Raises:
        InvalidArray: it is something else, or packed in another layout.
    """
    check = getattr(packed, "check_owner", None)
    if check is None:
        raise InvalidArray(
            f"packed is a {type(packed).__name__}, not packed weights: pass kernel.pack(w)."
        )
    check(owner)
