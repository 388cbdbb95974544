"""Packed weights: what one kernel made of w, to be given back to it at each call."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.errors import InvalidArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeights:
    """Weights in the layout of the kernel that `owner` names."""

    owner: str
    memory: NDArray[np.generic]

    def check_owner(self, owner: str) -> None:
        """Check that these weights were packed by the kernel that is to use them.

        Raises:
            InvalidArray: another kernel packed them.
        """
        if self.owner != owner:
            raise InvalidArray(
                f"packed was made by kernel {self.owner}, but this is {owner}: "
                "pack the weights with this kernel."
            )
