"""A generated C++ source, named by its content."""

from dataclasses import dataclass
from hashlib import sha256

from gemm_tuner.domain.operation import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The text of one translation unit.

    In one that `keeps_roundings`, each operation is rounded by itself: compilers may not make one
    instruction of a product and a sum. `abi_version` is what the kernel says of itself.
    """

    text: str
    keeps_roundings: bool = False
    abi_version: int = Operation.LINEAR.abi_version

    @property
    def sha256(self) -> str:
        """Return the hex digest of the text."""
        return sha256(self.text.encode()).hexdigest()
