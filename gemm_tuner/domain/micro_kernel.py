"""Micro-kernels: the innermost register tile, as rows of a table."""

from dataclasses import dataclass
from enum import StrEnum

from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.vectors import Vectors, VectorsCan
from gemm_tuner.errors import InvalidCandidate


class PackedLayout(StrEnum):
    """How packed weights lie in memory; see docs/kernels.md for pictures."""

    PANELS = "panels"  # blocks of kc; in each, panels of nr columns, k-major
    COLUMNS = "columns"  # each column of w contiguous, padded to whole vectors
    GROUPS = "groups"  # panels of nr columns; in each, groups of k with their scales


class Can(StrEnum):
    """The capabilities of a template's micro-kernels, where types, tile and CPU allow them."""

    BROADCAST_X = "broadcast_x"  # multiply one element or group of x by vectors of columns
    SHUFFLE_X = "shuffle_x"  # load four steps of x at once, and pick each by a shuffle
    REUSE_PANEL = "reuse_panel"  # leave a block of a panel in L2 for the next tile of rows
    KEEP_PANEL = "keep_panel"  # hold all of a short panel in registers
    READ_PANELS_SIDE_BY_SIDE = "read_panels_side_by_side"
    FETCH_NEAR = "fetch_near"  # fetch weights a few steps ahead, for few rows
    FETCH_NEXT_PANEL = "fetch_next_panel"  # a part of it in each tile
    FETCH_NEXT_BLOCK = "fetch_next_block"  # a part of it in each tile of rows
    READ_WEIGHTS_ONCE = "read_weights_once"  # load them past L1, where no other tile needs them
    CONVERT_ONCE = "convert_once"  # take weights that were converted for several tiles
    UNPACK_GROUPS = "unpack_groups"  # make weights in groups numbers as it multiplies
    SPLIT_DIGITS = "split_digits"  # multiply blocks of x as integers of a few digits of 8 bits
    STORE_PAIRS = "store_pairs"  # finish two vectors of a row of y at once
    STREAM_Y = "stream_y"  # write vectors of y past the caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A template of micro-kernels: the layout of packed weights it reads, and what it can do.

    `of_floats` is the template that multiplies its weights once they were converted to floats.
    """

    name: str
    layout: PackedLayout
    can: frozenset[Can] = frozenset()
    of_floats: str = ""


class Rate(StrEnum):
    """By which rate of a core its multiplications of vectors are counted."""

    MULTIPLY_ADDS = "multiply_adds"
    PAIRS = "pairs"  # of bf16
    QUADS = "quads"  # of bytes


class Additions(StrEnum):
    """In which order the products of an element of y are added, besides slices of k."""

    ANY = "any"  # several sums, or several products at once, or rounded otherwise
    IN_TURN = "in_turn"  # one fused multiply-add of f32 after the other, along k
    EXACT = "exact"  # of integers: every order gives the same


class PackedX(StrEnum):
    """The type of C that x is packed in, where tiles would else convert its elements."""

    FLOATS = "float"
    WORDS = "int16_t"

    @property
    def size_bytes(self) -> int:
        """Return the size of an element."""
        return 4 if self is PackedX.FLOATS else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The template of one multiplication, and what it asks of its surroundings.

    `converts` says whether it makes weights numbers of another type, which can be done once for
    several tiles; `packed_x` is what it makes of x. A step's weights fill `weight_registers` for
    each vector of columns, and what converts them fills `constants` besides a table. One that
    `needs_two_signs` multiplies unsigned bytes by signed ones. `additions` says in which order it
    adds, where vectors have an instruction that multiplies and adds.
    """

    name: str
    rate: Rate = Rate.MULTIPLY_ADDS
    converts: bool = False
    packed_x: PackedX | None = None
    weight_registers: int = 1
    constants: int = 0
    needs_two_signs: bool = False
    additions: Additions = Additions.ANY


# Of x in fixed point: as many bits as make it exact down to 2^-6 of the largest in a block in f32,
# and to 2^-14 in bf16.
MOST_DIGITS = 4
_DIGITS = {DType.F32: MOST_DIGITS, DType.BF16: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroKernelFamily:
    """One row of the catalog: a template and the register tiles it makes.

    One multiplication by `product` takes `k_step` steps of k: they lie side by side in packed
    weights. `tiles` are the (mr, nr) pairs on offer. After `partial_steps` steps of k, sums in a
    narrow type are moved to the accumulator; 0 if there are none.

    Where a register holds a tile, it has `register_rows` rows of sums, and one multiplication takes
    `k_tile` steps of k, of which `k_step` lie side by side.

    `dot` multiplies the same elements, as floats, in dot products along k; None if nothing does.
    """

    name: str
    types: frozenset[OperandTypes]
    isa: frozenset[IsaFeature]
    template: Template
    product: Product
    vectors: Vectors
    tiles: tuple[tuple[int, int], ...]
    k_step: int
    partial_steps: int = 0
    register_rows: int = 1
    k_tile: int = 0
    dot: "MicroKernelFamily | None" = None

    @property
    def lanes(self) -> int:
        """Return how many floats a vector holds."""
        return self.vectors.lanes

    @property
    def registers(self) -> int:
        """Return how many vectors the family may fill."""
        return self.vectors.registers

    @property
    def layout(self) -> PackedLayout:
        """Return how its packed weights lie."""
        return self.template.layout

    @property
    def can(self) -> frozenset[Can]:
        """Return the capabilities of its template."""
        return self.template.can

    @property
    def k_multiple(self) -> int:
        """Return the multiple to which packed weights are padded along k, in every block."""
        return self.k_tile or self.k_step

    @property
    def is_in_fixed_point(self) -> bool:
        """Return whether blocks of x are multiplied as integers of a few digits of 8 bits."""
        return Can.SPLIT_DIGITS in self.can

    @property
    def additions(self) -> Additions:
        """Return the order in which it adds."""
        is_fused = IsaFeature.FMA in self.isa
        in_turn = self.product.additions is Additions.IN_TURN
        return Additions.ANY if in_turn and not is_fused else self.product.additions

    @property
    def can_be_fixed(self) -> bool:
        """Return whether its kernels give the bits that a fixed order of additions asks for."""
        return self.additions is not Additions.ANY

    def digits(self, x: DType) -> int:
        """Return the digits of an element of x; 0 if x is not in fixed point."""
        return _DIGITS[x] if self.is_in_fixed_point else 0

    def packs_pairs(self, types: OperandTypes) -> bool:
        """Return whether chunks of weights in groups lie as products of pairs of bf16 read them.

        Those of fixed point do where another family for these types has such products too.
        """
        if not self.is_in_fixed_point:
            return self.k_step > 1
        has_pairs = VectorsCan.MULTIPLY_PAIRS in self.vectors.can
        return types.w.size_bits == 8 or (types.x is DType.BF16 and has_pairs)

    def converts_weights(self, types: OperandTypes) -> bool:
        """Return whether tiles convert weights, which can also be done once for several of them."""
        is_other_type = types.w is not DType.F32
        return Can.CONVERT_ONCE in self.can and self.product.converts and is_other_type

    def packed_x(self, x: DType) -> PackedX | None:
        """Return what x becomes where it is packed, None if it is multiplied as it lies."""
        return self.product.packed_x if x is not DType.F32 else None

    def can_shuffle(self, x: DType) -> bool:
        """Return whether four steps of x can be loaded at once and picked by shuffles."""
        is_word = self.k_step * x.size_bytes == 4
        can_pick = Can.SHUFFLE_X in self.can and VectorsCan.PICK_QUARTERS in self.vectors.can
        return can_pick and not self.partial_steps and is_word

    def can_stream(self, y: DType) -> bool:
        """Return whether vectors of y are cache lines, which can be written past the caches."""
        is_line = y.size_bytes == 4 or self.stores_pairs(y)
        can_fill = Can.STREAM_Y in self.can and VectorsCan.FILL_LINES in self.vectors.can
        return can_fill and is_line

    def stores_pairs(self, y: DType) -> bool:
        """Return whether two vectors of y are rounded by one instruction and stored as one."""
        rounds_pairs = IsaFeature.AVX512_BF16 in self.isa and y is DType.BF16
        return Can.STORE_PAIRS in self.can and rounds_pairs

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
