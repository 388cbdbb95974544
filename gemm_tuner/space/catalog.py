"""THE table of micro-kernel families. Adding one is adding a row here and a template file."""

from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import F32, DType, OperandTypes
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.errors import InvalidCandidate

_AVX2 = frozenset({IsaFeature.AVX2, IsaFeature.FMA})
_AVX512 = _AVX2 | {
    IsaFeature.AVX512F,
    IsaFeature.AVX512VL,
    IsaFeature.AVX512BW,
    IsaFeature.AVX512DQ,
}

_F32 = frozenset({F32})
_BF16 = frozenset({OperandTypes.of(DType.BF16), OperandTypes.of(DType.BF16, y=DType.F32)})
_SCALAR_TILES = ((1, 1), (2, 4), (4, 2), (1, 8))


def _outer_tiles(lanes: int, registers: int, widths: range) -> tuple[tuple[int, int], ...]:
    """Return the tiles whose sums, one panel row and one element of x fit into the registers."""
    return tuple(
        (mr, vectors * lanes)
        for vectors in widths
        for mr in range(1, 33)
        if mr * vectors + vectors + 1 <= registers
    )


def _dot_tiles(lanes: int, registers: int, widths: range) -> tuple[tuple[int, int], ...]:
    """Return the tiles of dot products whose sums, weights and one vector of x fit."""
    return tuple(
        (mr, nr) for nr in widths for mr in range(1, lanes + 1) if mr * nr + nr + 1 <= registers
    )


# fmt: off
CATALOG: dict[str, MicroKernelFamily] = {family.name: family for family in (
    MicroKernelFamily(
        name="avx512_f32", types=_F32, isa=_AVX512, template="outer_product",
        vector_part="vector_avx512", lanes=16, registers=32, layout=PackedLayout.PANELS,
        tiles=_outer_tiles(16, 32, range(1, 9))),
    MicroKernelFamily(
        name="avx512_f32_dot", types=_F32, isa=_AVX512, template="dot_product",
        vector_part="vector_avx512", lanes=16, registers=32, layout=PackedLayout.COLUMNS,
        tiles=_dot_tiles(16, 32, range(1, 9))),
    MicroKernelFamily(
        name="avx2_f32", types=_F32, isa=_AVX2, template="outer_product",
        vector_part="vector_avx2", lanes=8, registers=16, layout=PackedLayout.PANELS,
        tiles=_outer_tiles(8, 16, range(1, 9))),
    MicroKernelFamily(
        name="avx2_f32_dot", types=_F32, isa=_AVX2, template="dot_product",
        vector_part="vector_avx2", lanes=8, registers=16, layout=PackedLayout.COLUMNS,
        tiles=_dot_tiles(8, 16, range(1, 5))),
    # The reference that completes the table: any x86-64 CPU can run it.
    MicroKernelFamily(
        name="scalar_f32", types=_F32, isa=frozenset(), template="outer_product",
        vector_part="vector_scalar", lanes=1, registers=16, layout=PackedLayout.PANELS,
        tiles=_SCALAR_TILES),

    # bf16 by the instruction for it: two steps of k in each multiplication.
    MicroKernelFamily(
        name="avx512_bf16", types=_BF16, isa=_AVX512 | {IsaFeature.AVX512_BF16},
        template="outer_product_pairs", vector_part="vector_avx512", lanes=16, registers=32,
        layout=PackedLayout.PANELS, tiles=_outer_tiles(16, 32, range(1, 9)), k_step=2),
    # bf16 by conversion to f32, for CPUs without it, and where memory is the limit.
    MicroKernelFamily(
        name="avx512_bf16_by_f32", types=_BF16, isa=_AVX512, template="outer_product",
        vector_part="vector_avx512", lanes=16, registers=32, layout=PackedLayout.PANELS,
        tiles=_outer_tiles(16, 32, range(1, 7))),
    MicroKernelFamily(
        name="avx512_bf16_dot", types=_BF16, isa=_AVX512, template="dot_product",
        vector_part="vector_avx512", lanes=16, registers=32, layout=PackedLayout.COLUMNS,
        tiles=_dot_tiles(16, 32, range(1, 9))),
    MicroKernelFamily(
        name="avx2_bf16_by_f32", types=_BF16, isa=_AVX2, template="outer_product",
        vector_part="vector_avx2", lanes=8, registers=16, layout=PackedLayout.PANELS,
        tiles=_outer_tiles(8, 16, range(1, 5))),
    MicroKernelFamily(
        name="avx2_bf16_dot", types=_BF16, isa=_AVX2, template="dot_product",
        vector_part="vector_avx2", lanes=8, registers=16, layout=PackedLayout.COLUMNS,
        tiles=_dot_tiles(8, 16, range(1, 5))),
    MicroKernelFamily(
        name="scalar_bf16", types=_BF16, isa=frozenset(), template="outer_product",
        vector_part="vector_scalar", lanes=1, registers=16, layout=PackedLayout.PANELS,
        tiles=_SCALAR_TILES),
)}
# fmt: on


def family_named(name: str) -> MicroKernelFamily:
    """Return the row of the catalog called `name`.

    Raises:
        InvalidCandidate: there is none.
    """
    family = CATALOG.get(name)
    if family is None:
        raise InvalidCandidate(
            f"kernel family {name!r} is not known; use one of: {', '.join(CATALOG)}."
        )
    return family
