"""The operations: what is multiplied, and which operands are known before a call."""

from dataclasses import dataclass
from enum import StrEnum

from gemm_tuner.errors import InvalidProblem


class Operation(StrEnum):
    """What a problem computes of x."""

    LINEAR = "linear"  # weights: the same w in all calls, packed once ahead of them
    MATMUL = "matmul"  # a second activation: another w in each call
    ATTENTION = "attention"  # keys and values: softmax(steps(x @ w.T)) @ v, all new in each call

    @property
    def packs_ahead(self) -> bool:
        """Return whether w is known ahead of calls, and so can be quantised and packed for them."""
        return _FACTS[self].packs_ahead

    @property
    def abi_version(self) -> int:
        """Return the least version of the kernel ABI that callers of its kernels must know."""
        return _FACTS[self].abi_version

    @property
    def factors(self) -> tuple[str, str]:
        """Return what callers call x and w."""
        return _FACTS[self].factors

    @property
    def has_values(self) -> bool:
        """Return whether the products are scores, by which the rows of a third array are added."""
        return _FACTS[self].has_values

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words that name the operation in front of a text; the usual one has none."""
        return () if self is Operation.LINEAR else (self.value,)

    @classmethod
    def parse(cls, text: str) -> "Operation":
        """Return the operation of this name.

        Raises:
            InvalidProblem: there is none.
        """
        try:
            return cls(text)
        except ValueError:
            raise InvalidProblem(
                f"operation {text!r} is not known; use 'linear' for a layer, whose w is constant, "
                "'matmul' for a product of two activations, or 'attention'."
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The facts of an operation."""

    packs_ahead: bool
    abi_version: int
    has_values: bool = False
    factors: tuple[str, str] = ("x", "w")


_FACTS = {
    Operation.LINEAR: _Facts(packs_ahead=True, abi_version=3),
    Operation.MATMUL: _Facts(packs_ahead=False, abi_version=4),
    Operation.ATTENTION: _Facts(
        packs_ahead=False, abi_version=5, has_values=True, factors=("q", "k")
    ),
}
