"""Packed weights: what a kernel made of w, to be given to it, or one like it, at each call."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.errors import InvalidArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeights:
    """Weights in the layout that `owner` names: the `packed_format` of kernels, or one kernel."""

    owner: str
    memory: NDArray[np.generic]

    def check_owner(self, owner: str) -> None:
        """Check that these weights lie as the kernel that is to use them needs.

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
