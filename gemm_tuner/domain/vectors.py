"""Vectors: the registers that a family of kernels computes in, and what can be done with them."""

from dataclasses import dataclass
from enum import StrEnum

from gemm_tuner.domain.cpu import IsaFeature


class VectorsCan(StrEnum):
    """The capabilities of vectors besides arithmetic, which all have."""

    LOOK_UP = "look_up"  # pick floats from a table of 16 in a register, or of 32 in two
    PICK_QUARTERS = "pick_quarters"  # load 16 bytes to each quarter, and repeat 4 of them in each
    MIX_BITS = "mix_bits"  # any function of three bits, in one instruction
    FILL_LINES = "fill_lines"  # a vector is a cache line, which can be written past the caches
    MULTIPLY_PAIRS = "multiply_pairs"  # there are CPUs that multiply pairs of bf16 in them


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """Registers of one width: `registers` of them, of `lanes` floats each.

    The templates in `templates/vectors/<name>/` compute with them, on CPUs that have `isa`, and
    alone know their instructions. In inline assembly, `constraint` stands for any of the registers.
    One instruction shuffles within `shuffled_bytes`.
    """

    name: str
    lanes: int
    registers: int
    isa: frozenset[IsaFeature]
    constraint: str
    shuffled_bytes: int
    can: frozenset[VectorsCan] = frozenset()

    @property
    def are_scalars(self) -> bool:
        """Return whether a vector is a single float, for CPUs of any instruction set."""
        return self.lanes == 1
