"""Problems with a fixed order of additions: the same bits from every kernel, or it is refuted."""

import ctypes
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from grids import grid_toolchain
from needs import each_executed, need_compiler
from numpy.typing import NDArray
from proof import Needs, Subject, prove_all
from rows import ROWS, ROWS_WITH_TAILS, Row, candidate_text

from gemm_tuner.bench.drivers import build_fixed_order
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.build.compile import Build, compile_hosted, compile_kernels
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem, Reduction
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.libraries.fixed_order import FixedOrder, multiplied
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.resources import library_native_dir
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import CATALOG, family_named

AVX2 = frozenset({IsaFeature.AVX2, IsaFeature.FMA})
HAS_AVX2 = detect_cpu().isa >= AVX2 | {IsaFeature.F16C}
needs_avx2 = pytest.mark.skipif(not HAS_AVX2, reason="the CPU has no AVX2")

BLOCKED = Subject(
    problem="f32 1..9x21x37 nk scale+bias+gelu_erf fixed",
    candidate="avx2_f32_4x16 mc4_nc16_kc16 jc_ic_jr_ir",
)


@needs_avx2
def test_kernels_of_each_type_give_the_bits_of_the_definition() -> None:
    subjects = [
        BLOCKED,
        Subject(
            problem="bf16 1..7x19x37 kn silu fixed",
            candidate="avx2_bf16_by_f32_3x8 mc3_nc8_kc16 jc_ic_jr_ir pack_x convert_once",
        ),
        Subject(
            problem="bf16_s4 1..5x19x101 nk:g32 bias fixed",
            candidate="avx2_w4_2x16 mc2_nc16_kc32 jc_ic_jr_ir u2",
        ),
        Subject(
            problem="u8_s8_s32_s8 5x19x37 nk x_zero_point+channel_scale+y_zero_point fixed",
            candidate="avx2_int8_dot_2x4 mc2_nc4_kc37 jc_ic_jr_ir",
        ),
    ]

    assert not prove_all(subjects, find_toolchain())


def _in_blocks_apart(_source: Source) -> Source:
    """Return the kernel for any order: it adds up the sums of each block of k by itself."""
    problem = replace(Problem.parse(BLOCKED.problem), reduction=Reduction.ANY)
    text = _rendered(problem, BLOCKED.candidate).text
    return Source(text=text.replace(problem.text, BLOCKED.problem), keeps_roundings=True)


def _with_fused_steps(source: Source) -> Source:
    return replace(source, keeps_roundings=False)


def _in_two_operations(source: Source) -> Source:
    fused = re.compile(r'asm\("vfmadd231ps [^\n]*')
    return replace(source, text=fused.sub("sums += x * w;", source.text))


@needs_avx2
@pytest.mark.parametrize("plant", [_in_blocks_apart, _with_fused_steps, _in_two_operations])
def test_a_kernel_with_other_roundings_is_wrong(plant: Callable[[Source], Source]) -> None:
    def respell(source: Source, isa: frozenset[IsaFeature]) -> Needs:
        assert plant(source) != source
        return plant(source), isa

    # What is optimised little is not fused.
    toolchain = grid_toolchain(as_served=plant is _with_fused_steps)

    [finding] = prove_all([BLOCKED], toolchain, respell=respell).values()

    assert finding.outcome is Outcome.WRONG
    assert "other bits than the fixed order" in finding.detail


# What kernels of AVX-512 name, in what any compiler makes of two vectors of AVX2.
_IN_HALVES = {
    r'asm\("vfmadd231ps [^;]*;': "for (int i = 0; i < 16; ++i)"
    " sums[i] = __builtin_fmaf(x[i], w[i], sums[i]);",
    r'asm\("vpdpbusd [^;]*;': "for (int i = 0; i < 64; ++i) sums[i / 4] +="
    " static_cast<uint8_t>(x[i / 4] >> i % 4 * 8) * static_cast<int8_t>(w[i / 4] >> i % 4 * 8);",
    r'asm\("vmaxps %1, %2[^;]*;': "result = broadcast(bound) > value ? broadcast(bound) : value;",
    r'asm\("vminps %1, %2[^;]*;': "result = broadcast(bound) < value ? broadcast(bound) : value;",
    r'asm\("vmaxps %1, %0[^;]*;': "value = value > low ? value : low;",
    r'asm\("vminps %1, %0[^;]*;': "value = value < high ? value : high;",
    r'asm\("vrndscaleps \$8[^;]*;': "for (int i = 0; i < 16; ++i)"
    " rounded[i] = __builtin_rintf(value[i]);",
    r'asm\("vpmovdb [^;]*;': "for (int i = 0; i < 16; ++i) bytes[i] = value[i];",
    r"__builtin_ia32_storedquqi128_mask[^;]*;": "for (int i = 0; i < count; ++i)"
    " static_cast<int8_t *>(to)[i] = bytes[i];",
    r'asm\("vmovntps [^;]*;': "*reinterpret_cast<Row *>(to) = row;",
    r'asm\("" : "\+v"\((value|bits|index)\)\);': r"(void)\1;",
    r'asm\("vcvtph2ps [^;]*"v"[^;]*;': "for (int i = 0; i < 16; ++i)"
    " value[i] = number_of(bits[i]);",
    r'asm\("vcvtph2ps [^;]*"m"[^;]*;': "for (int i = 0; i < 16; ++i)"
    " value[i] = number_of(from[i].bits);",
    r"return to_float\(__builtin_ia32_loaddquhi256_mask[^;]*;": "{ F16Vector bits = {};"
    " for (int i = 0; i < count; ++i) bits[i] = from[i].bits; return to_float(bits); }",
    r'asm\("vcvtps2ph \$0[^;]*;': "for (int i = 0; i < 16; ++i) bits[i] = half_of(value[i]);",
    r'asm\("vpmovsxbd [^;]*;': "for (int i = 0; i < 16; ++i)"
    " integers[i] = reinterpret_cast<const int8_t *>(chunk + step * lanes)[i];",
    r'asm\("vpermps [^;]*;': "for (int i = 0; i < 16; ++i) weights[i] = numbers[index[i] & 15];",
    r'asm\("vpmovzxwd [^;]*"m"[^;]*;': "for (int i = 0; i < 16; ++i) wide[i] = from[i].bits;",
    r'asm\("vpmovzxwd [^;]*"v"[^;]*;': "for (int i = 0; i < 16; ++i)"
    " wide[i] = i < count ? from[i].bits : 0;",
    r"return __builtin_ia32_loadups512_mask[^;]*;": "{ Vector value = {};"
    " for (int i = 0; i < count; ++i) value[i] = from[i]; return value; }",
    r"__builtin_ia32_storeups512_mask[^;]*;": "for (int i = 0; i < count; ++i) to[i] = value[i];",
    r"__builtin_ia32_storedquhi256_mask[^;]*;": "for (int i = 0; i < count; ++i)"
    " to[i].bits = bits[i];",
}


_HALVES_OF_C = """
static inline float number_of(uint16_t bits) {
    _Float16 half;
    __builtin_memcpy(&half, &bits, 2);
    return half;
}
static inline uint16_t half_of(float number) {
    const _Float16 half = number;
    uint16_t bits;
    __builtin_memcpy(&bits, &half, 2);
    return bits;
}
"""


def _in_halves(source: Source, _isa: frozenset[IsaFeature]) -> Needs:
    text = source.text.replace("#include <stdint.h>\n", f"#include <stdint.h>\n{_HALVES_OF_C}", 1)
    for instruction, spelled in _IN_HALVES.items():
        text = re.sub(instruction, spelled, text)
    return replace(source, text=text), AVX2 | {IsaFeature.F16C}


@needs_avx2
@pytest.mark.parametrize(
    ("types", "tile", "epilogue"),
    [
        ("f32", "avx512_f32_2x32 mc2_nc32_kc16", "scale+gelu_erf+bias"),
        ("bf16", "avx512_bf16_by_f32_2x32 mc2_nc32_kc16", "row_scale+silu+bias"),
        ("s8_s8_s32_s8", "avx512_int8_2x32 mc2_nc32_kc16", "channel_scale+tanh+y_zero_point"),
        ("f16", "avx512_f16_by_f32_2x32 mc2_nc32_kc16", "scale+mish+bias"),
        ("f32_s8", "avx512_w8_2x32 mc2_nc32_kc32", "bias+gelu_tanh"),
        ("bf16_s4", "avx512_w4_2x32 mc2_nc32_kc32", "silu+bias"),
        *(
            pytest.param("f32", "avx512_f32_2x32 mc2_nc32_kc16", name, marks=pytest.mark.proof)
            for name, kind in STEP_KINDS.items()
            if not kind.is_offset and name not in {"y_zero_point", "scale", "gelu_erf", "bias"}
        ),
    ],
)
def test_the_source_for_avx512_gives_the_same_bits(types: str, tile: str, epilogue: str) -> None:
    """Its instructions are spelled in C: they compute what AVX2's do, in longer vectors."""
    layout, k = ("kn:g32", 65) if "_" in types and "s32" not in types else ("kn", 33)
    subject = Subject(
        problem=f"{types} 1..5x37x{k} {layout} {epilogue} fixed", candidate=f"{tile} jc_ic_jr_ir"
    )

    assert not prove_all([subject], grid_toolchain(as_served=False), respell=_in_halves)


def _rendered(problem: Problem, candidate: str) -> Source:
    parsed = Candidate.parse(candidate)
    return render(problem, parsed, family_named(parsed.micro_kernel.family))


def _kernels(*subjects: tuple[str, str]) -> list[Kernel]:
    sources = [
        (_rendered(Problem.parse(problem), candidate), _isa_of(candidate))
        for problem, candidate in subjects
    ]
    kernels = []
    for build in compile_kernels(sources, toolchain=grid_toolchain(as_served=False)):
        assert isinstance(build, Build)
        kernels.append(load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu()))
    return kernels


def _isa_of(candidate: str) -> frozenset[IsaFeature]:
    return family_named(Candidate.parse(candidate).micro_kernel.family).isa


@needs_avx2
@pytest.mark.parametrize(
    ("types", "candidates"),
    [
        (
            "f32",
            (
                "avx2_f32_6x16 mc12_nc32_kc96 jc_ic_jr_ir pack_x",
                "avx2_f32_1x32 mc64_nc64_kc200 ic_jc_ir_jr pf512 u4 grid1x2",
            ),
        ),
        (
            "bf16",
            (
                "avx2_bf16_by_f32_4x16 mc64_nc32_kc64 jc_ic_jr_ir convert_once grid2x1",
                "avx2_bf16_by_f32_1x32 mc64_nc64_kc200 ic_jc_ir_jr",
            ),
        ),
        (
            "s8_s8_s32_bf16",
            (
                "avx2_int8_4x16 mc64_nc32_kc64 jc_ic_jr_ir pack_x grid1x1x2",
                "avx2_int8_dot_2x4 mc64_nc8_kc200 jc_ic_jr_ir",
            ),
        ),
    ],
)
def test_a_row_is_the_same_in_every_call(types: str, candidates: tuple[str, str]) -> None:
    """Whatever m, the parts and the kernel, which differ in tile, blocks and instructions."""
    text = f"{types} {{}}x75x200 nk scale+silu+bias fixed"
    inputs = make_inputs(Problem.parse(text.format(64)), InputKind.NORMAL, seed=7)
    operands: dict[str, Any] = {name: inputs.operands[name] for name in ("scale", "bias")}
    ranged, single = _kernels(
        (text.format("1..64"), candidates[0]), (text.format(1), candidates[1])
    )
    wanted = ranged(inputs.x, ranged.pack(inputs.w), **operands)
    packed = ranged.pack(inputs.w), single.pack(inputs.w)

    for m in (1, 2, 7, 64):
        for parts in (1, 2, 7):
            y = ranged(inputs.x[:m], packed[0], parts=parts, **operands)
            assert y.tobytes() == wanted[:m].tobytes(), (m, parts)
    for row in range(0, 64, 21):
        for parts in (1, 2, 7):
            y = single(inputs.x[row : row + 1], packed[1], parts=parts, **operands)
            assert y.tobytes() == wanted[row].tobytes(), (row, parts)


@pytest.mark.parametrize(
    "text",
    [
        "f32 3x21x37 nk bias+gelu_erf+add fixed",
        "bf16_s4 3x21x37 kn:g32 bias+silu fixed",
        "u8_s8_s32_s8 3x21x37 nk x_zero_point+channel_scale+y_zero_point fixed",
    ],
)
def test_what_runs_where_no_kernel_is_served_gives_the_same_bits(text: str) -> None:
    problem = Problem.parse(text)
    inputs = make_inputs(problem, InputKind.NORMAL, seed=7)
    order = FixedOrder.load(build_fixed_order(find_toolchain()))
    right = order.compute(
        problem,
        inputs.x,
        multiplied(problem, inputs.w, inputs.scales),
        [*inputs.operands.values()],
    )

    fallback = FallbackKernel(problem=problem, reason="Nothing was tuned.")
    given: dict[str, Any] = {**inputs.operands}
    y = np.asarray(fallback(inputs.x, fallback.pack(inputs.w, scales=inputs.scales), **given))

    assert y.tobytes() == right.tobytes()
    assert fallback.library == "the fixed order in plain C"
    assert "slow" in fallback.reason


@pytest.mark.parametrize("zero", [5, 2**31 - 1, 3 - 2**31])
def test_sums_of_bytes_wrap_exactly_whatever_the_zero_point(zero: int) -> None:
    problem = Problem.parse("s8_s8_s32_s32 1x1x200001 nk x_zero_point fixed")
    fallback = FallbackKernel(problem=problem, reason="Nothing was tuned.")
    x, w = (np.full((1, problem.k), value, np.int8) for value in (1, 127))

    y = np.asarray(fallback(x, fallback.pack(w), x_zero_point=np.int32(zero)))

    assert y[0, 0] == (problem.k * 127 * (1 - zero) + 2**31) % 2**32 - 2**31


def test_the_definition_rounds_each_addition_once() -> None:
    """Without instructions too: compared with exact fractions, where roundings are close."""
    library = build_fixed_order(find_toolchain())
    random = np.random.default_rng(3)
    x, w = (random.standard_normal((4, 5)).astype(np.float32) for _turn in range(2))
    x[0, 1], w[0, 1] = np.float32(1e-30), np.float32(1e-14)  # a subnormal product
    x[1, :2], w[1, :2] = (1, 1 + 2**-12), (1, 1 - 2**-12)  # no tie, though in double it is one
    for uses_instructions in {False, HAS_AVX2}:
        order = FixedOrder(ctypes.CDLL(str(library)), uses_instructions=uses_instructions)
        y = order.compute(
            Problem.parse("f32 4x4x5 nk none fixed"), x, np.ascontiguousarray(w.T), []
        )
        for i, j in np.ndindex(4, 4):
            assert y[i, j] == _in_fractions(x[i], w[j])


@needs_avx2
@pytest.mark.parametrize("name", ["gcc", "clang", pytest.param("zig", marks=pytest.mark.proof)])
def test_the_definition_is_the_same_where_a_compiler_might_fuse(name: str) -> None:
    """As zig does by default, which compiles for the CPU that it runs on."""
    toolchain = need_compiler(name)
    source = (library_native_dir() / "fixed_order.c").read_text()
    fusing = FixedOrder.load(compile_hosted(source, name="fused", toolchain=toolchain, isa=AVX2))
    plain = FixedOrder.load(build_fixed_order(find_toolchain()))
    for text in ("f32 4x30x37 nk scale+gelu_erf+mish fixed", "f32_s8 4x30x64 nk:g32 silu fixed"):
        problem = Problem.parse(text)
        inputs = make_inputs(problem, InputKind.NORMAL, seed=7)
        w = multiplied(problem, inputs.w, inputs.scales)
        results = [
            order.compute(problem, inputs.x, w, [*inputs.operands.values()])
            for order in (fusing, plain)
        ]
        assert results[0].tobytes() == results[1].tobytes(), text


def _in_fractions(x: NDArray[np.float32], w: NDArray[np.float32]) -> np.float32:
    """Return the sum of products, each rounded to float32 from the exact fraction."""
    total = Fraction(0)
    for a, b in zip(x, w, strict=True):
        exact = Fraction(float(a)) * Fraction(float(b)) + total
        guess = np.float32(float(exact))
        near = [
            np.nextafter(guess, np.float32(-np.inf)),
            guess,
            np.nextafter(guess, np.float32(np.inf)),
        ]
        distances = [abs(Fraction(float(one)) - exact) for one in near]
        [*ties] = [one for one, far in zip(near, distances, strict=True) if far == min(distances)]
        total = Fraction(float(min(ties, key=lambda one: int(one.view(np.int32)) % 2)))
    return np.float32(float(total))


def test_families_of_other_orders_cannot_be_fixed() -> None:
    fixed = {name for name, family in CATALOG.items() if family.can_be_fixed}

    assert {"avx512_f32", "avx2_f32", "avx2_bf16_by_f32", "avx512_f16_by_f32"} <= fixed
    assert {"amx_int8", "avx512_int8_dot", "scalar_int8"} <= fixed
    assert not fixed & {"avx2_f32_dot", "avx512_bf16", "amx_bf16", "avx512_fp16", "scalar_f32"}
    assert {"avx2_w8", "avx512_w4"} <= fixed
    assert not fixed & {"avx_vnni_w8", "avx512_bf16_w4", "amx_bf16_w8", "scalar_w8"}


FIXED_ROWS = [
    row
    for row in ROWS_WITH_TAILS
    if row.family.can_be_fixed
    and row.types.accumulator is not DType.F16
    and not row.types.is_weight_only
] + [
    row
    for row in ROWS
    if row.family.can_be_fixed and row.types.is_weight_only and row.types.w.is_signed
]
CHAINS = (
    "x_zero_point+channel_scale+gelu_tanh+bias",
    "scale+row_scale+mish+add",
    "scale+elu:0.3+mul+clamp:-0.5:6",
    "x_row_zero_point+scale+tanh+leaky_relu:0.2+sigmoid",
    "scale+silu+hardswish+relu",
    "scale+gelu_erf+y_zero_point",
)


@pytest.mark.proof
@pytest.mark.parametrize("row", each_executed(FIXED_ROWS))
def test_every_family_that_can_be_fixed_gives_the_bits_of_the_definition(row: Row) -> None:
    """With every step, tails in rows, columns and k, blocks of k, and what an axis offers.

    Of f32, every chain comes with both depths; of other types with one of them, by turns.
    """
    depths = (37, 2 * row.family.k_multiple + (65 if row.types.is_weight_only else 1))
    is_of_panels = row.family.layout is PackedLayout.PANELS
    extras = ("", " u2", " pack_x", " pf1024 u4", " grid2x1", " grid1x2") if is_of_panels else ("",)
    subjects = [
        Subject(
            problem=f"{row.problem(f'1..7x21x{k}', layout, chain)} fixed",
            candidate=candidate_text(row, k, extras=extra),
        )
        for turn, (chain, extra) in enumerate(zip(CHAINS, cycle(extras), strict=False))
        for way, (k, layout) in enumerate(zip(depths, ("nk", "kn"), strict=True))
        if row.is_plain or way == turn.bit_count() % 2
    ]

    assert not prove_all(subjects, grid_toolchain(as_served=row.stands_for_all))


@pytest.mark.parametrize(
    "family", [each for each in CATALOG.values() if each.can_be_fixed], ids=lambda each: each.name
)
def test_no_source_has_a_step_of_its_own_instruction_set(family: MicroKernelFamily) -> None:
    """Tables and reciprocals of AVX-512 are quicker, and give other bits."""
    epilogue = "scale+sigmoid+tanh+mish+gelu_tanh+gelu_erf"
    types = min(family.types, key=lambda one: (one.accumulator is DType.F16, one.w.value, one.text))
    problem = Row(family=family, types=types).problem("5x40x64", "nk", epilogue)
    mr, nr = family.tiles[0]
    candidate = f"{family.name}_{mr}x{nr} mc{mr}_nc{nr}_kc64 jc_ic_jr_ir"
    fixed, free = (
        _rendered(Problem.parse(f"{problem}{word}"), candidate) for word in (" fixed", "")
    )

    for instruction in ("vrcp14ps", "vpermt2ps", "vcvtne2ps2bf16", "vcvtneps2bf16"):
        assert instruction not in fixed.text
    assert ("vrcp14ps" in free.text) == (family.lanes == 16)
    assert fixed.keeps_roundings
    assert not free.keeps_roundings
