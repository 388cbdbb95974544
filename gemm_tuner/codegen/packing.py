"""How packing moves weights: as blocks of units, transposed in registers."""

from dataclasses import dataclass

from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem, WeightLayout

_NARROW_BYTES = 16
_WIDE_BYTES = 64
_LARGEST_SIDE = 8
# Enough for whole cache lines on both sides, and few enough for them to stay in L1.
_ROW_GROUPS = 16
_STRETCH_BYTES = 512


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
    def row_bytes(self) -> int:
        """Return the size of a row of the block, in bytes."""
        return self.side * self.unit_bytes

    @property
    def first_halves(self) -> tuple[int, ...]:
        """Return the indices that take the units of two rows in turn, from the start on."""
        return tuple(index for i in range(self.side // 2) for index in (i, i + self.side))

    @property
    def second_halves(self) -> tuple[int, ...]:
        """Return the indices that take the units of two rows in turn, from the middle on."""
        return tuple(index + self.side // 2 for index in self.first_halves)


def packing_block(problem: Problem, family: MicroKernelFamily) -> PackingBlock:
    """Return the block that a family packs at once.

    Where packed weights keep the order in which w lies, its rows are copied as whole vectors.
    Otherwise they are transposed: squares of groups of `k_step` elements, or, where groups lie
    across rows, `k_step` rows.
    """
    element_bytes = problem.types.w.size_bytes
    is_nk = problem.w_layout is WeightLayout.NK
    is_columns = family.layout is PackedLayout.COLUMNS
    if is_columns and is_nk:
        return PackingBlock(rows=1, side=family.k_step, unit_bytes=element_bytes, stretch=1)
    if not is_columns and not is_nk:
        return PackingBlock(
            rows=family.k_step,
            side=family.lanes,
            unit_bytes=element_bytes,
            stretch=_ROW_GROUPS * family.k_step,
        )
    group = 1 if is_columns else family.k_step
    unit_bytes = group * element_bytes
    side = _side(family, unit_bytes)
    return PackingBlock(
        rows=side, side=side, unit_bytes=unit_bytes, stretch=_STRETCH_BYTES // unit_bytes * group
    )


def _side(family: MicroKernelFamily, unit_bytes: int) -> int:
    """Return the side of a square.

    AVX2 shuffles only within 16 bytes in one instruction. A larger square than of 8 by 8 is no
    faster, and takes the compiler longer.
    """
    fitting = _WIDE_BYTES if family.vectors == "avx512" else _NARROW_BYTES
    return min(family.lanes, fitting // unit_bytes, _LARGEST_SIDE)
