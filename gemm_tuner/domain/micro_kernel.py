"""Micro-kernels: the innermost register tile, as rows of a table."""

from dataclasses import dataclass
from enum import StrEnum

from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.errors import InvalidCandidate


class PackedLayout(StrEnum):
    """How packed weights lie in memory; see docs/kernels.md for pictures."""

    PANELS = "panels"  # blocks of kc; in each, panels of nr columns, k-major
    COLUMNS = "columns"  # each column of w contiguous, padded to whole vectors
    GROUPS = "groups"  # panels of nr columns; in each, groups of k with their scales


# The templates that finish a row of y in vectors of columns.
_FINISHING_ROWS = frozenset({"outer_product", "grouped", "fixed_point"})
# Of x in fixed point: as many bits as make it exact down to 2^-6 of the largest in a block in f32,
# and to 2^-14 in bf16.
MOST_DIGITS = 4
_DIGITS = {DType.F32: MOST_DIGITS, DType.BF16: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroKernelFamily:
    """One row of the catalog: a template and the register tiles it makes.

    `vectors` names the vectors, of `lanes` floats each; `registers` is how many of them the family
    may fill. `product` is the template of one multiplication, which takes `k_step` steps of k: they
    lie side by side in packed weights. `tiles` are the (mr, nr) pairs on offer. After
    `partial_steps` steps of k, sums in a narrow type are moved to the accumulator; 0 if there are
    none.

    Where a register holds a tile, it has `register_rows` rows of sums, and one multiplication takes
    `k_tile` steps of k, of which `k_step` lie side by side.
    """

    name: str
    types: frozenset[OperandTypes]
    isa: frozenset[IsaFeature]
    template: str
    product: str
    vectors: str
    lanes: int
    registers: int
    layout: PackedLayout
    tiles: tuple[tuple[int, int], ...]
    k_step: int
    partial_steps: int = 0
    register_rows: int = 1
    k_tile: int = 0

    @property
    def k_multiple(self) -> int:
        """Return what packed weights are padded to along k, in every block of k."""
        return self.k_tile or self.k_step

    @property
    def is_in_fixed_point(self) -> bool:
        """Return whether blocks of x are multiplied as integers of a few digits of 8 bits."""
        return self.template == "fixed_point"

    def digits(self, x: DType) -> int:
        """Return the digits of an element of x; 0 if x is not in fixed point."""
        return _DIGITS[x] if self.is_in_fixed_point else 0

    def packs_pairs(self, types: OperandTypes) -> bool:
        """Return whether chunks of weights in groups lie as products of pairs of bf16 read them.

        Those of fixed point do where another family for these types has such products too.
        """
        if not self.is_in_fixed_point:
            return self.k_step > 1
        return types.w.size_bits == 8 or (types.x is DType.BF16 and self.vectors == "avx512")

    def converts_weights(self, types: OperandTypes) -> bool:
        """Return whether tiles convert weights, which can also be done once for several of them."""
        return self.template == "grouped" or (
            self.template == "outer_product"
            and self.product == "float"
            and types.w is not DType.F32
        )

    def can_shuffle(self, x: DType) -> bool:
        """Return whether four steps of x can be loaded at once and picked by shuffles."""
        is_word = self.k_step * x.size_bytes == 4
        is_plain = self.template == "outer_product" and not self.partial_steps
        return self.vectors == "avx512" and is_plain and is_word

    def can_stream(self, y: DType) -> bool:
        """Return whether vectors of y are cache lines, which can be written past the caches."""
        is_line = y.size_bytes == 4 or self.stores_pairs(y)
        return self.vectors == "avx512" and self.template in _FINISHING_ROWS and is_line

    def stores_pairs(self, y: DType) -> bool:
        """Return whether two vectors of y are rounded by one instruction and stored as one."""
        rounds_pairs = IsaFeature.AVX512_BF16 in self.isa and y is DType.BF16
        return self.template in _FINISHING_ROWS and rounds_pairs

    def panel_width(self, nr: int) -> int:
        """Return the columns of a packed panel, for tiles of `nr` columns."""
        return self.lanes if self.k_tile else nr


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroKernel:
    """One register tile of a family: `mr` rows of x by `nr` columns of w."""

    family: str
    mr: int
    nr: int

    def __post_init__(self) -> None:
        """Check the tile."""
        if self.mr < 1 or self.nr < 1:
            raise InvalidCandidate(f"register tile {self.mr}x{self.nr} is empty.")

    @property
    def text(self) -> str:
        """Return the text form: `avx512_f32_8x48`."""
        return f"{self.family}_{self.mr}x{self.nr}"

    @classmethod
    def parse(cls, text: str) -> "MicroKernel":
        """Return the micro-kernel written as `avx512_f32_8x48`.

        Raises:
            InvalidCandidate: the text does not have this form.
        """
        family, _underscore, tile = text.rpartition("_")
        mr, _x, nr = tile.partition("x")
        if not (family and mr.isdecimal() and nr.isdecimal()):
            raise InvalidCandidate(
                f"micro-kernel {text!r} is not understood; write it as 'avx512_f32_8x48'."
            )
        return cls(family=family, mr=int(mr), nr=int(nr))
