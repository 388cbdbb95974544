"""The table of micro-kernel families and their parts.

Adding a family is adding a row here, and a template where it computes in a new way.
"""

from dataclasses import replace

from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import F32, TERMS_IN_F16, DType, OperandTypes
from gemm_tuner.domain.micro_kernel import (
    MOST_DIGITS,
    Additions,
    Can,
    MicroKernelFamily,
    PackedLayout,
    PackedX,
    Product,
    Rate,
    Template,
)
from gemm_tuner.domain.vectors import Vectors, VectorsCan
from gemm_tuner.errors import InvalidCandidate

_AVX2 = frozenset({IsaFeature.AVX2, IsaFeature.FMA})
_AVX512 = _AVX2 | {
    IsaFeature.AVX512F,
    IsaFeature.AVX512VL,
    IsaFeature.AVX512BW,
    IsaFeature.AVX512DQ,
}

# What families need besides the instructions of their vectors.
_NONE: frozenset[IsaFeature] = frozenset()
_F16C = frozenset({IsaFeature.F16C})
_BF16_PAIRS = frozenset({IsaFeature.AVX512_BF16})
_F16_PAIRS = frozenset({IsaFeature.AVX512_FP16})
_VNNI = frozenset({IsaFeature.AVX512_VNNI})
_AVX_VNNI = _F16C | {IsaFeature.AVX_VNNI}
_AMX_BF16 = _BF16_PAIRS | {IsaFeature.AMX_TILE, IsaFeature.AMX_BF16}
_AMX_INT8 = _VNNI | {IsaFeature.AMX_TILE, IsaFeature.AMX_INT8}
_AMX_FP16 = frozenset({IsaFeature.AMX_TILE, IsaFeature.AMX_FP16})

_F32 = frozenset({F32})
_BF16 = frozenset({OperandTypes.of(DType.BF16), OperandTypes.of(DType.BF16, y=DType.F32)})
_F16 = frozenset({OperandTypes.of(DType.F16), OperandTypes.of(DType.F16, y=DType.F32)})
_F16_SUMS = frozenset(
    OperandTypes(x=DType.F16, w=DType.F16, accumulator=DType.F16, y=y)
    for y in (DType.F16, DType.F32)
)
_F16_ANY = _F16 | _F16_SUMS
_INT8 = frozenset(
    OperandTypes(x=x, w=w, accumulator=DType.S32, y=y)
    for x in (DType.U8, DType.S8)
    for w in (DType.U8, DType.S8)
    for y in (DType.F32, DType.BF16, DType.F16, DType.S32, DType.S8, DType.U8)
)
_WEIGHT_ONLY = {
    bits: frozenset(
        OperandTypes(x=x, w=w, accumulator=DType.F32, y=y)
        for x, y in ((DType.F32, DType.F32), (DType.BF16, DType.BF16), (DType.BF16, DType.F32))
        for w in integers
    )
    for bits, integers in ((8, (DType.S8, DType.U8)), (4, (DType.S4, DType.U4)))
}
_W8, _W4 = _WEIGHT_ONLY[8], _WEIGHT_ONLY[4]
_W4_BF16 = frozenset(types for types in _W4 if types.x is DType.BF16)
_W8_BF16 = frozenset(types for types in _W8 if types.x is DType.BF16)
# Rows by columns, of up to eight registers: sums, one of x for each row of them, and one of w.
_AMX_TILES = ((16, 16), (16, 32), (16, 48), (16, 64), (32, 16), (32, 32), (48, 16))
_SCALAR_TILES = ((1, 1), (2, 4), (4, 2), (1, 8))


def _outer_tiles(lanes: int, registers: int, widths: range) -> tuple[tuple[int, int], ...]:
    """Return the tiles whose sums, one panel row and one element of x leave a register free.

    Without a free one, compilers that read an element before they are done with the one before
    keep a sum in memory (gcc 12, clang 19), unless the template forbids it.
    """
    return tuple(
        (mr, vectors * lanes)
        for vectors in widths
        for mr in range(1, 33)
        if mr * vectors + vectors + 1 < registers
    )


def _dot_tiles(lanes: int, registers: int) -> tuple[tuple[int, int], ...]:
    """Return the tiles of dot products whose sums, rows or columns, and one of the others fit.

    Of one row, eight sums are enough for none to wait for the one before.
    """
    return tuple(
        (mr, nr)
        for nr in range(1, lanes + 1)
        for mr in range(1, lanes + 1)
        if mr * nr + min(mr, nr) + 1 <= registers and (mr > 1 or nr <= 8)
    )


_V512 = Vectors(
    name="avx512",
    lanes=16,
    registers=32,
    isa=_AVX512,
    constraint="v",
    shuffled_bytes=64,
    can=frozenset(VectorsCan),
)
_V256 = Vectors(name="avx2", lanes=8, registers=16, isa=_AVX2, constraint="x", shuffled_bytes=16)
_V1 = Vectors(name="scalar", lanes=1, registers=16, isa=_NONE, constraint="x", shuffled_bytes=16)

_FINISHING_ROWS = frozenset({Can.STORE_PAIRS, Can.STREAM_Y})
_OUTER_PRODUCT = Template(
    name="outer_product",
    layout=PackedLayout.PANELS,
    can=_FINISHING_ROWS
    | {
        Can.BROADCAST_X,
        Can.SHUFFLE_X,
        Can.REUSE_PANEL,
        Can.KEEP_PANEL,
        Can.READ_PANELS_SIDE_BY_SIDE,
        Can.FETCH_NEAR,
        Can.FETCH_NEXT_PANEL,
        Can.CONVERT_ONCE,
    },
    of_floats="outer_product",
)
_DOT_PRODUCT = Template(name="dot_product", layout=PackedLayout.COLUMNS)
_GROUPED = Template(
    name="grouped",
    layout=PackedLayout.GROUPS,
    can=_FINISHING_ROWS
    | {Can.BROADCAST_X, Can.CONVERT_ONCE, Can.UNPACK_GROUPS, Can.READ_PANELS_SIDE_BY_SIDE},
    of_floats="outer_product",
)
_FIXED_POINT = Template(
    name="fixed_point",
    layout=PackedLayout.GROUPS,
    can=_FINISHING_ROWS | {Can.SPLIT_DIGITS, Can.READ_PANELS_SIDE_BY_SIDE},
)
_AMX = Template(
    name="amx",
    layout=PackedLayout.PANELS,
    can=frozenset({Can.STORE_PAIRS, Can.READ_WEIGHTS_ONCE, Can.FETCH_NEXT_BLOCK}),
)
_AMX_GROUPED = Template(
    name="amx_grouped", layout=PackedLayout.GROUPS, can=frozenset({Can.STORE_PAIRS})
)

# fmt: off
PRODUCTS: dict[str, Product] = {product.name: product for product in (
    Product(name="float", converts=True, packed_x=PackedX.FLOATS, additions=Additions.IN_TURN),
    Product(name="float_dot"),
    Product(name="bf16_pairs", rate=Rate.PAIRS),
    Product(name="bf16_pairs_dot", rate=Rate.PAIRS),
    Product(name="bf16_tiles"),
    Product(name="f16_pairs"),
    Product(name="f16_tiles"),
    Product(name="int8_quads", rate=Rate.QUADS, needs_two_signs=True, additions=Additions.EXACT),
    Product(name="int8_quads_dot", rate=Rate.QUADS, needs_two_signs=True,
            additions=Additions.EXACT),
    Product(name="int8_pairs", packed_x=PackedX.WORDS, additions=Additions.EXACT),
    Product(name="int8_pairs_dot", additions=Additions.EXACT),
    Product(name="int8_single", additions=Additions.EXACT),
    Product(name="int8_tiles", additions=Additions.EXACT),
    Product(name="w8_float", converts=True, packed_x=PackedX.FLOATS, additions=Additions.IN_TURN),
    Product(name="w4_float", converts=True, packed_x=PackedX.FLOATS, weight_registers=2,
            additions=Additions.IN_TURN),
    Product(name="w8_bf16_pairs", rate=Rate.PAIRS, converts=True, constants=5),
    Product(name="w4_bf16_pairs", rate=Rate.PAIRS, converts=True),
    Product(name="w8_bf16_tiles"),
    Product(name="w4_bf16_tiles"),
    Product(name="digits", rate=Rate.QUADS),
)}
# fmt: on


def _outer(
    name: str,
    vectors: Vectors,
    types: frozenset[OperandTypes],
    isa: frozenset[IsaFeature],
    product: str,
    *,
    k_step: int = 1,
    partial_steps: int = 0,
    scratch: int = 0,
    widest: int = 8,
    tight: tuple[tuple[int, int], ...] = (),
) -> MicroKernelFamily:
    """Return a family of outer products whose tiles are up to `widest` vectors wide.

    A multiplication fills `scratch` registers besides its operands. The tiles in `tight` leave none
    free: their operands are read in turn with the products.
    """
    tiles = _outer_tiles(vectors.lanes, vectors.registers - scratch, range(1, widest + 1))
    return MicroKernelFamily(
        name=name,
        types=types,
        isa=vectors.isa | isa,
        template=_OUTER_PRODUCT,
        product=PRODUCTS[product],
        vectors=vectors,
        tiles=_SCALAR_TILES if vectors.are_scalars else (*tiles, *tight),
        k_step=k_step,
        partial_steps=partial_steps,
    )


def _dot(
    name: str,
    vectors: Vectors,
    types: frozenset[OperandTypes],
    isa: frozenset[IsaFeature],
    product: str,
    *,
    k_step: int,
    scratch: int = 0,
) -> MicroKernelFamily:
    """Return a family of dot products; a multiplication fills `scratch` registers of its own."""
    return MicroKernelFamily(
        name=name,
        types=types,
        isa=vectors.isa | isa,
        template=_DOT_PRODUCT,
        product=PRODUCTS[product],
        vectors=vectors,
        tiles=_dot_tiles(vectors.lanes, vectors.registers - scratch),
        k_step=k_step,
    )


def _grouped(
    name: str,
    vectors: Vectors,
    types: frozenset[OperandTypes],
    isa: frozenset[IsaFeature],
    product: str,
    *,
    k_step: int = 1,
) -> MicroKernelFamily:
    """Return a family of outer products for weights in groups, which two registers unpack."""
    tiles = _outer_tiles(vectors.lanes, vectors.registers - 2, range(1, 9))
    return MicroKernelFamily(
        name=name,
        types=types,
        isa=vectors.isa | isa,
        template=_GROUPED,
        product=PRODUCTS[product],
        vectors=vectors,
        tiles=_SCALAR_TILES if vectors.are_scalars else tiles,
        k_step=k_step,
    )


def _fixed_point(
    name: str,
    vectors: Vectors,
    types: frozenset[OperandTypes],
    isa: frozenset[IsaFeature],
) -> MicroKernelFamily:
    """Return a family of products of bytes for weights in groups and x in fixed point.

    Each sum is one of every digit; two registers hold what weights are moved by. Products of many
    rows take longer than to convert the weights for all of them.
    """
    tiles = tuple(
        (mr, width * vectors.lanes)
        for width in range(1, 9)
        for mr in range(1, 5)
        if (MOST_DIGITS * mr + 1) * width + 2 < vectors.registers - 1
    )
    return MicroKernelFamily(
        name=name,
        types=types,
        isa=vectors.isa | isa,
        template=_FIXED_POINT,
        product=PRODUCTS["digits"],
        vectors=vectors,
        tiles=tiles,
        k_step=4,
    )


def _amx(
    name: str,
    types: frozenset[OperandTypes],
    isa: frozenset[IsaFeature],
    product: str,
    *,
    k_step: int,
    template: Template = _AMX,
) -> MicroKernelFamily:
    """Return a family whose sums stay in tile registers, of 16 rows and columns of 4 bytes."""
    return MicroKernelFamily(
        name=name,
        types=types,
        isa=_V512.isa | isa,
        template=template,
        product=PRODUCTS[product],
        vectors=_V512,
        tiles=_AMX_TILES,
        k_step=k_step,
        register_rows=16,
        k_tile=16 * k_step,
    )


# Families that convert to float hold the converted numbers in registers; those of scalars complete
# the table: any x86-64 CPU can run them. Families of bytes may have to write f16: every CPU with
# AVX2 has F16C.
# fmt: off
_FAMILIES = (
    _outer("avx512_f32",           _V512, _F32,      _NONE,       "float"),
    _dot  ("avx512_f32_dot",       _V512, _F32,      _NONE,       "float_dot",      k_step=16),
    _outer("avx2_f32",             _V256, _F32,      _NONE,       "float",
           tight=((4, 24),)),
    _dot  ("avx2_f32_dot",         _V256, _F32,      _NONE,       "float_dot",      k_step=8),
    _outer("scalar_f32",           _V1,   _F32,      _NONE,       "float"),

    _amx  ("amx_bf16",                    _BF16,     _AMX_BF16,   "bf16_tiles",     k_step=2),
    _outer("avx512_bf16",          _V512, _BF16,     _BF16_PAIRS, "bf16_pairs",     k_step=2),
    _outer("avx512_bf16_by_f32",   _V512, _BF16,     _NONE,       "float"),
    _dot  ("avx512_bf16_dot",      _V512, _BF16,     _NONE,       "float_dot",      k_step=16),
    _dot  ("avx512_bf16_pairs_dot", _V512, _BF16,     _BF16_PAIRS, "bf16_pairs_dot", k_step=32),
    _outer("avx2_bf16_by_f32",     _V256, _BF16,     _NONE,       "float",          widest=4),
    _dot  ("avx2_bf16_dot",        _V256, _BF16,     _NONE,       "float_dot",      k_step=8),
    _outer("scalar_bf16",          _V1,   _BF16,     _NONE,       "float"),

    _amx  ("amx_fp16",                    _F16_ANY,  _AMX_FP16,   "f16_tiles",      k_step=2),
    _outer("avx512_fp16",          _V512, _F16_SUMS, _F16_PAIRS,  "f16_pairs",      k_step=2,
           partial_steps=2 * TERMS_IN_F16, scratch=1),
    _outer("avx512_f16_by_f32",    _V512, _F16_ANY,  _NONE,       "float"),
    _dot  ("avx512_f16_dot",       _V512, _F16_ANY,  _NONE,       "float_dot",      k_step=16),
    _outer("avx2_f16_by_f32",      _V256, _F16_ANY,  _F16C,       "float",          widest=4),
    _dot  ("avx2_f16_dot",         _V256, _F16_ANY,  _F16C,       "float_dot",      k_step=8),
    _outer("scalar_f16",           _V1,   _F16_ANY,  _NONE,       "float"),

    _amx  ("amx_int8",                    _INT8,     _AMX_INT8,   "int8_tiles",     k_step=4),
    _outer("avx512_int8",          _V512, _INT8,     _VNNI,       "int8_quads",     k_step=4),
    _dot  ("avx512_int8_dot",      _V512, _INT8,     _VNNI,       "int8_quads_dot", k_step=64),
    _outer("avx_vnni_int8",        _V256, _INT8,     _AVX_VNNI,   "int8_quads",     k_step=4),
    _outer("avx2_int8",            _V256, _INT8,     _F16C,       "int8_pairs",     k_step=2),
    _dot  ("avx2_int8_dot",        _V256, _INT8,     _F16C,       "int8_pairs_dot", k_step=16,
           scratch=1),
    _outer("scalar_int8",          _V1,   _INT8,     _NONE,       "int8_single"),

    _amx("amx_bf16_w8",                   _W8_BF16,  _AMX_BF16,   "w8_bf16_tiles",  k_step=2,
         template=_AMX_GROUPED),
    _amx("amx_bf16_w4",                   _W4_BF16,  _AMX_BF16,   "w4_bf16_tiles",  k_step=2,
         template=_AMX_GROUPED),
    _grouped("avx512_w8",          _V512, _W8,       _NONE,       "w8_float"),
    _grouped("avx512_w4",          _V512, _W4,       _NONE,       "w4_float"),
    _grouped("avx512_bf16_w8",     _V512, _W8_BF16,  _BF16_PAIRS, "w8_bf16_pairs",  k_step=2),
    _grouped("avx512_bf16_w4",     _V512, _W4_BF16,  _BF16_PAIRS, "w4_bf16_pairs",  k_step=2),
    _fixed_point("avx512_vnni_w8",_V512, _W8,      _VNNI),
    _fixed_point("avx512_vnni_w4",_V512, _W4,      _VNNI),
    _fixed_point("avx_vnni_w8",   _V256, _W8,      _AVX_VNNI),
    _fixed_point("avx_vnni_w4",   _V256, _W4,      _AVX_VNNI),
    _grouped("avx2_w8",            _V256, _W8,       _NONE,       "w8_float"),
    _grouped("avx2_w4",            _V256, _W4,       _NONE,       "w4_float"),
    _grouped("scalar_w8",          _V1,   _W8,       _NONE,       "w8_float"),
    _grouped("scalar_w4",          _V1,   _W4,       _NONE,       "w4_float"),
)
# fmt: on


def _dot_of(family: MicroKernelFamily) -> MicroKernelFamily | None:
    """Return the family of dot products of floats with the types and the vectors of another."""
    dots = (
        one
        for one in _FAMILIES
        if one.product.name == "float_dot"
        and one.vectors == family.vectors
        and one.types == family.types
        and one.isa <= family.isa
    )
    return next(dots, None) if family.layout is PackedLayout.PANELS else None


CATALOG: dict[str, MicroKernelFamily] = {
    family.name: replace(family, dot=_dot_of(family)) for family in _FAMILIES
}


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
