"""Families of the catalog with their types, and what tests of several files ask of them."""

from dataclasses import dataclass

from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import F32, DType, OperandTypes
from gemm_tuner.domain.epilogue import Epilogue
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.space.catalog import CATALOG

KC = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A family of the catalog with one of its combinations of types."""

    family: MicroKernelFamily
    types: OperandTypes

    @property
    def name(self) -> str:
        return f"{self.family.name}-{self.types.text}"

    @property
    def isa(self) -> frozenset[IsaFeature]:
        return self.family.isa

    @property
    def is_plain(self) -> bool:
        """Say whether all is f32: of these, every value of everything is proved.

        Loops, epilogues and tails are the same for other types; what differs is how elements are
        read, multiplied and written.
        """
        return self.types == F32

    @property
    def stands_for_all(self) -> bool:
        """Say whether it is f32 by outer products in vectors: of these, more is combined.

        Loops, cuts of rows and chains of steps are the same for dot products and without vectors.
        """
        return (
            self.is_plain and self.family.template.name == "outer_product" and self.family.lanes > 1
        )

    @property
    def stride_of_tiles(self) -> int:
        """Return which of the family's tiles are proved: every one, or one of so many."""
        tiles = len(self.family.tiles)
        if self.is_plain:
            return 1 if self.stands_for_all and tiles < 40 else 3
        return next(stride for fewest, stride in ((40, 7), (10, 5), (0, 1)) if tiles >= fewest)

    @property
    def layout_as_packed(self) -> str:
        """Return the layout of w that packing only copies: the quickest to compile.

        It is for tests of what comes after packing.
        """
        return "nk" if self.family.layout is PackedLayout.COLUMNS else "kn"

    def problem(self, sizes: str, layout: str, epilogue: str) -> str:
        """Return a problem with the steps of an epilogue that these types can have.

        Quantised weights are in groups of 32.
        """
        groups = ":g32" if self.types.is_weight_only else ""
        return f"{self.types.text} {sizes} {layout}{groups} {usable(epilogue, self.types)}"


def usable(epilogue: str, types: OperandTypes) -> str:
    """Return the epilogue without steps that do not go with the types, offsets first."""
    steps = Epilogue.parse(epilogue).steps
    offsets = [step.text for step in steps if step.kind.is_offset]
    others = [step.text for step in steps if not step.kind.is_offset]
    if not types.accumulator.is_integer:
        offsets = []
    if types.y is DType.S32:
        others = []
    return "+".join([*offsets, *others]) or "none"


def is_proved(types: OperandTypes) -> bool:
    """Leave out what differs in nothing: how y is written does not depend on the sign of w."""
    is_unsigned = types.x.is_integer and types.w is DType.U8
    return not is_unsigned or types.y is DType.F32


ROWS = [
    Row(family=family, types=types)
    for family in CATALOG.values()
    for types in sorted(family.types, key=lambda types: types.text)
    if is_proved(types)
]

# Tails and blocks do not depend on how results are written: each family is proved there with one
# combination of types, and where signs matter with one for each. Dot products that convert bf16
# have the micro-kernel of those that convert f16. Of those for quantised weights, those of AVX-512
# with zero points are, which do the most; test_groups.py proves the rest. test_amx.py proves AMX on
# other CPUs.
_FEW = {
    "amx_fp16": {"f16"},
    "amx_bf16_w8": set(),
    "amx_bf16_w4": set(),
    "amx_int8": {"u8_s8_s32_u8", "s8_s8_s32_f32"},
    "avx512_bf16_dot": set(),
    "avx512_int8": {"u8_s8_s32_u8", "s8_s8_s32_f32"},
    "avx512_int8_dot": {"s8_s8_s32_f32"},
    "avx_vnni_int8": {"u8_s8_s32_u8"},
    "avx2_int8": {"s8_s8_s32_f32"},
    "avx2_int8_dot": {"u8_s8_s32_u8"},
    "scalar_int8": {"s8_s8_s32_f32"},
    "avx512_w8": {"bf16_u8_f32_bf16"},
    "avx512_w4": {"f32_u4_f32_f32"},
    "avx512_bf16_w4": set(),
    "avx2_w8": set(),
    "avx2_w4": set(),
    "scalar_w8": set(),
    "scalar_w4": set(),
}
_PLAIN = {"f32", "bf16", "f16"}
ROWS_WITH_TAILS = [
    row
    for row in ROWS
    if row.types.text in _FEW.get(row.family.name, _PLAIN) or row.family.partial_steps
]
# These are kernels of bfloat16 but for the functions that read and write so many elements, which
# tails of n prove: test_conversions.py proves that nothing else differs.
LIKE_BF16 = {
    "avx512_f16_by_f32": "avx512_bf16_by_f32",
    "avx2_f16_by_f32": "avx2_bf16_by_f32",
    "scalar_f16": "scalar_bf16",
}
FEW_ROWS = [row for row in ROWS_WITH_TAILS if row.family.name not in LIKE_BF16]


def small_tile(family: MicroKernelFamily) -> tuple[int, int]:
    """Return a tile of several rows and more than one vector, so that tails have all forms."""
    wanted = 2 if family.layout is PackedLayout.COLUMNS else 2 * family.lanes
    return max(
        (tile for tile in family.tiles if tile[1] == wanted and tile[0] <= 3),
        default=family.tiles[1],
    )


def lowest_tile(family: MicroKernelFamily) -> tuple[int, int]:
    """Return the tile as wide as the small one with the fewest rows: the quickest to compile."""
    _mr, nr = small_tile(family)
    return min(tile for tile in family.tiles if tile[1] == nr)


def around(*edges: int) -> list[int]:
    return sorted(
        {edge + offset for edge in (0, *edges) for offset in (-1, 0, 1) if edge + offset >= 0}
    )


def candidate_text(
    row: Row,
    k: int,
    *,
    order: LoopOrder = LoopOrder.JC_IC_JR_IR,
    extras: str = "",
    tile: tuple[int, int] | None = None,
) -> str:
    family = row.family
    mr, nr = tile or small_tile(family)
    is_whole = family.layout is not PackedLayout.PANELS
    kc = max(1, k + -k % family.k_step) if is_whole else max(KC, family.k_multiple)
    return f"{family.name}_{mr}x{nr} mc{2 * mr}_nc{2 * nr}_kc{kc} {order.value}{extras}"
