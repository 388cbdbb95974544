"""How packing moves weights: as blocks of units, shuffled in registers."""

from dataclasses import dataclass
from math import ceil, lcm

from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.weight_layout import WeightLayout

_LANE_BYTES = 16
_CHUNK_BYTES = 4
_LARGEST_SIDE = 8
# Enough for whole cache lines on both sides, and few enough for them to stay in L1.
_ROW_GROUPS = 16
# Of rows that are copied in a call: few enough for the prefetcher to follow each, and whole lines
# of panels that are an odd number of vectors wide. Measured on an EPYC of Zen 3.
_ROWS_TO_COPY = 4
_STRETCH_BYTES = 512
_STRIP_BYTES = 256
# A strip of as many rows, of a cache line each, takes a fourth of L1 at most.
_SCALAR_STRETCH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingBlock:
    """A block of w: `rows` rows as the caller stores them, each of `side` units of `unit_bytes`.

    `stretch` steps of k are packed in one go, blocks beside each other.
    """

    rows: int
    side: int
    unit_bytes: int
    stretch: int

    @property
    def is_copy(self) -> bool:
        """Return whether rows stay as they are."""
        return self.rows == 1

    @property
    def is_interleaved(self) -> bool:
        """Return whether units of a few rows come to lie side by side, in vectors of columns."""
        return 1 < self.rows < self.side

    @property
    def row_bytes(self) -> int:
        """Return the size of a row of the block, in bytes."""
        return self.side * self.unit_bytes

    @property
    def lane_bytes(self) -> int:
        """Return the size of the parts of a row within which units are shuffled, in bytes."""
        return min(self.row_bytes, _LANE_BYTES)

    @property
    def lanes(self) -> int:
        """Return the number of these parts."""
        return self.row_bytes // self.lane_bytes

    @property
    def lane_units(self) -> int:
        """Return the units in one of these parts."""
        return self.lane_bytes // self.unit_bytes

    @property
    def unrolled(self) -> int:
        """Return how many turns of the outer loops over a block are written out."""
        return self.side if self.side <= _LARGEST_SIDE else 1

    @property
    def first_units(self) -> tuple[int, ...]:
        """Return the indices of units of two rows in turn, of the first halves of their lanes."""
        return tuple(
            unit
            for lane in range(0, self.side, self.lane_units)
            for i in range(lane, lane + self.lane_units // 2)
            for unit in (i, i + self.side)
        )

    @property
    def second_units(self) -> tuple[int, ...]:
        """Return the same of the second halves of their lanes."""
        return tuple(unit + self.lane_units // 2 for unit in self.first_units)

    @property
    def first_lanes(self) -> tuple[int, ...]:
        """Return the indices of halves of lanes: lanes of two rows in turn, of the first halves."""
        return tuple(
            half
            for i in range(0, self.lanes, 2)
            for lane in (i, i + 2 * self.lanes)
            for half in (lane, lane + 1)
        )

    @property
    def second_lanes(self) -> tuple[int, ...]:
        """Return the same of the second halves of the rows."""
        return tuple(half + self.lanes for half in self.first_lanes)


def packing_block(problem: Problem, family: MicroKernelFamily, width: int) -> PackingBlock:
    """Return the block that a family packs at once, for panels of `width` columns.

    Where packed weights keep the order in which w lies, its rows are copied as whole vectors.
    Where they hold `k_step` rows side by side, these are interleaved. Otherwise they are
    transposed: squares of groups of `k_step` elements, or of as many elements as a vector takes.
    """
    if family.layout is PackedLayout.GROUPS:
        return _chunks_block(problem, family, width)
    element_bytes = problem.types.w.size_bytes
    is_nk = problem.w_layout is WeightLayout.NK
    if family.layout is PackedLayout.COLUMNS:
        side = _columns_side(problem, family)
        return PackingBlock(
            rows=1 if is_nk else side,
            side=side,
            unit_bytes=element_bytes,
            stretch=_STRIP_BYTES // element_bytes,
        )
    if family.vectors.are_scalars:
        return _scalar_block(element_bytes, width, is_nk=is_nk)
    if is_nk:
        unit_bytes = family.k_step * element_bytes
        side = _side(family, unit_bytes)
        return PackingBlock(
            rows=side,
            side=side,
            unit_bytes=unit_bytes,
            stretch=_STRETCH_BYTES // unit_bytes * family.k_step,
        )
    is_copied_in_call = family.k_step == 1 and not problem.operation.packs_ahead
    return PackingBlock(
        rows=family.k_step,
        side=family.lanes * family.k_step,
        unit_bytes=element_bytes,
        stretch=_ROWS_TO_COPY if is_copied_in_call else _ROW_GROUPS * family.k_step,
    )


def panels_packed_together(problem: Problem, block: PackingBlock, nr: int) -> int:
    """Return how many panels of `nr` columns begin and end where blocks do.

    From `kn`, the columns of a block may be of several panels; a block is packed in one part.
    """
    if problem.w_layout is WeightLayout.NK:
        return 1
    return lcm(block.side, nr) // nr


def _scalar_block(element_bytes: int, width: int, *, is_nk: bool) -> PackingBlock:
    """Return the block of panels whose columns no vector holds: 16 bytes of each row.

    From `nk`, the rows of a panel are interleaved. From `kn`, a row holds a word of each panel: if
    it takes less than 16 bytes, squares of words are transposed.
    """
    word_bytes = element_bytes * width
    if is_nk or word_bytes >= _LANE_BYTES:
        return PackingBlock(
            rows=width if is_nk else 1,
            side=_LANE_BYTES // element_bytes,
            unit_bytes=element_bytes,
            stretch=_SCALAR_STRETCH,
        )
    side = _LANE_BYTES // word_bytes
    return PackingBlock(rows=side, side=side, unit_bytes=word_bytes, stretch=_SCALAR_STRETCH)


def _chunks_block(problem: Problem, family: MicroKernelFamily, width: int) -> PackingBlock:
    """Return the block of chunks of 32 bits a column, the steps of k in them side by side.

    Without vectors, 16 bytes of a row are packed at once: from `nk`, of each column of a panel.
    """
    steps = _CHUNK_BYTES * 8 // problem.types.w.size_bits
    lanes = max(family.lanes, _LANE_BYTES // _CHUNK_BYTES)
    if problem.w_layout is WeightLayout.NK:
        return PackingBlock(
            rows=width if family.vectors.are_scalars else lanes,
            side=lanes,
            unit_bytes=_CHUNK_BYTES,
            stretch=_STRETCH_BYTES // _CHUNK_BYTES * steps,
        )
    return PackingBlock(
        rows=_CHUNK_BYTES,
        side=lanes * _CHUNK_BYTES,
        unit_bytes=1,
        stretch=_ROW_GROUPS * steps,
    )


def _side(family: MicroKernelFamily, unit_bytes: int) -> int:
    """Return the side of a square.

    AVX2 shuffles only within 16 bytes in one instruction. A larger square than of 8 by 8 is no
    faster, and takes the compiler longer.
    """
    return min(family.lanes, family.vectors.shuffled_bytes // unit_bytes, _LARGEST_SIDE)


def _columns_side(problem: Problem, family: MicroKernelFamily) -> int:
    """Return the elements in the widest row of which packed columns are made."""
    packed_k = ceil(problem.k / family.k_step) * family.k_step
    widest = family.lanes * 4 // problem.types.w.size_bytes
    return widest if packed_k % widest == 0 else family.k_step
