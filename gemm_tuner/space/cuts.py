"""How the loops around a micro-kernel may be cut: what stays in L2 decides."""

from dataclasses import dataclass
from enum import Enum, auto
from itertools import product

from gemm_tuner.domain.blocking import LoopOrder


class Residence(Enum):
    """Which cache blocks stay in L2, and so which outer loops are cut."""

    NOTHING = auto()  # neither: one block of rows and one of columns
    X = auto()  # blocks of rows of x; all columns of w pass by
    W = auto()  # blocks of columns of w; all rows of x pass by
    BOTH = auto()  # both are cut; the block of w stays for all rows
    PANELS = auto()  # a panel or a few of w, packed in the call, stay in L1 for all rows of x


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How loops are cut and ordered: blocks fill one of `l2_parts` parts of L2, or half of L1."""

    residence: Residence = Residence.NOTHING
    l2_parts: int = 2
    is_ir_outer: bool = False

    @property
    def loop_order(self) -> LoopOrder:
        """Return the order: the loop over what stays in L2 is the outermost."""
        if self.residence is Residence.X:
            return LoopOrder.IC_JC_IR_JR if self.is_ir_outer else LoopOrder.IC_JC_JR_IR
        return LoopOrder.JC_IC_IR_JR if self.is_ir_outer else LoopOrder.JC_IC_JR_IR

    def is_beside(self, other: "Cut") -> bool:
        """Return whether the cuts differ in one respect."""
        differences = (
            self.residence is not other.residence,
            self.l2_parts != other.l2_parts,
            self.is_ir_outer != other.is_ir_outer,
        )
        return sum(differences) == 1


CUTS = tuple(
    Cut(residence=residence, l2_parts=l2_parts, is_ir_outer=is_ir_outer)
    for residence, l2_parts, is_ir_outer in product(Residence, (2, 4), (False, True))
)
# Beside the next block of w, which is fetched meanwhile; the columns are cut where x stays, too.
CUTS_BESIDE_NEXT = tuple(
    Cut(residence=residence, l2_parts=8, is_ir_outer=True)
    for residence in (Residence.X, Residence.W)
)
