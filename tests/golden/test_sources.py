"""Generated sources, kept to be read and reviewed. UPDATE_GOLDEN=1 writes them anew."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.catalog import family_named

FOLDER = Path(__file__).parent
SOURCES = {
    "avx512_gelu": (
        "f32 128x3072x768 nk bias+gelu_erf",
        "avx512_f32_12x32 mc132_nc3072_kc768 jc_ic_jr_ir pf16384",
    ),
    "avx512_packed_x_two_parts": (
        "f32 1..64x1000x2048 kn bias+clamp:0:6+add",
        "avx512_f32_8x48 mc64_nc1008_kc512 ic_jc_ir_jr pack_x u2 grid1x2",
    ),
    "avx512_narrow": (
        "f32 512x13x512 nk bias+relu",
        "avx512_f32_18x16 mc522_nc16_kc512 jc_ic_jr_ir",
    ),
    "avx2_dot": ("f32 1x100x300 nk scale", "avx2_f32_dot_1x4 mc1_nc100_kc300 jc_ic_jr_ir u4"),
    "avx2_two_streams": (
        "f32 1..2x50x64 nk bias",
        "avx2_f32_2x32 mc2_nc64_kc64 jc_ic_jr_ir ws2",
    ),
    "avx512_bf16": (
        "bf16 16x4096x4095 nk bias+silu",
        "avx512_bf16_8x48 mc16_nc4128_kc4096 jc_ic_jr_ir pf16384",
    ),
    "amx_int8": (
        "s8_u8_s32_f32 1..128x1000x1000 nk x_zero_point+channel_scale+bias",
        "amx_int8_32x32 mc128_nc1024_kc512 ic_jc_jr_ir pf4096",
    ),
    "amx_next_block": (
        "bf16 100x200x1000 nk bias+gelu_tanh",
        "amx_bf16_32x32 mc64_nc96_kc512 ic_jc_ir_jr pack_x pf_next",
    ),
    "avx512_int8": (
        "s8_s8_s32_u8 17x40x67 nk x_zero_point+channel_scale+bias+relu+scale+y_zero_point",
        "avx512_int8_6x32 mc18_nc64_kc68 jc_ic_jr_ir u2",
    ),
    "avx2_matmul_packed": (
        "matmul f32 1..128x100x64 nk scale+add",
        "avx2_f32_6x16 mc132_nc112_kc64 jc_ic_jr_ir pack_w",
    ),
    "avx2_matmul_bytes": (
        "matmul int8 16x100x67 kn x_zero_point+scale",
        "avx2_int8_4x16 mc16_nc64_kc32 ic_jc_jr_ir pack_w",
    ),
    "avx512_matmul_in_place": (
        "matmul f32 128x70x128 kn none",
        "avx512_f32_12x32 mc132_nc96_kc128 jc_ic_jr_ir",
    ),
    "avx2_attention": (
        "attention f32 1..128x500x60 scale+add+causal",
        "avx2_f32_6x16 mc132_nc128_kc60 ic_jc_jr_ir pack_w",
    ),
    "avx2_attention_of_few_queries": (
        "attention f32 1..4x1..4096x64 scale",
        "avx2_f32_4x16 mc4_nc128_kc64 ic_jc_jr_ir dot_keys grid1x8",
    ),
    "avx512_kept_panel": (
        "int8 64x32x14 nk bias+relu",
        "avx512_int8_8x32 mc64_nc32_kc16 jc_ic_jr_ir",
    ),
    "avx2_bf16_by_f32": (
        "bf16_bf16_f32_f32 7x20x9 nk none",
        "avx2_bf16_by_f32_4x16 mc8_nc32_kc9 jc_ic_jr_ir pack_x",
    ),
    "avx2_int8_packed_x": (
        "int8 7x20x9 nk bias",
        "avx2_int8_4x16 mc8_nc32_kc10 jc_ic_jr_ir pack_x",
    ),
    "avx512_fp16": (
        "f16_f16_f16_f16 24x512x1001 nk bias+relu",
        "avx512_fp16_12x32 mc24_nc512_kc1002 jc_ic_jr_ir pf8192",
    ),
    "avx512_f16_dot": (
        "f16 1x256x4095 nk bias+relu",
        "avx512_f16_dot_1x4 mc1_nc256_kc4095 jc_ic_jr_ir pf4096 u2",
    ),
    "avx512_bf16_w4_groups": (
        "bf16_u4 1..16x1000x4090 nk:g128 bias",
        "avx512_bf16_w4_4x64 mc16_nc1024_kc4090 jc_ic_jr_ir pf4096",
    ),
    "avx512_bf16_w8_one_row": (
        "bf16_s8 1x4096x4095 nk:gk none",
        "avx512_bf16_w8_1x64 mc1_nc4096_kc4095 jc_ic_jr_ir",
    ),
    "avx512_vnni_w4_fixed_point": (
        "f32_u4 1..2x1000x4090 nk:g32 bias",
        "avx512_vnni_w4_1x64 mc2_nc1024_kc4090 jc_ic_jr_ir pf16384",
    ),
    "avx512_w8_converted_once": (
        "f32_s8 256x4096x4096 nk:g128 none",
        "avx512_w8_8x48 mc256_nc4128_kc512 jc_ic_jr_ir convert_once pf_next",
    ),
    "avx512_f16_converted_once": (
        "f16 127x129x512 nk bias",
        "avx512_f16_by_f32_5x80 mc130_nc160_kc256 jc_ic_jr_ir convert_once pf_next",
    ),
    "scalar": ("f32 5x7x3 nk none", "scalar_f32_2x4 mc6_nc8_kc3 jc_ic_jr_ir"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_source_is_as_reviewed(name: str) -> None:
    problem, text = SOURCES[name]
    candidate = Candidate.parse(text)
    golden = FOLDER / f"{name}.cpp"

    source = render(Problem.parse(problem), candidate, family_named(candidate.micro_kernel.family))

    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(source.text)
    assert source.text == golden.read_text()


@pytest.mark.parametrize(
    ("rows", "ahead", "end"),
    [
        (2, 16384, "prefetch_w_bytes);"),
        (2, 1024, "prefetch_w_bytes, 0, 2);"),
        (3, 16384, "prefetch_w_bytes, 0, 2);"),
        (5, 16384, "prefetch_w_bytes, 0, 2);"),
    ],
)
def test_weights_are_fetched_into_l2_but_for_one_or_two_rows_far_ahead(
    rows: int, ahead: int, end: str
) -> None:
    problem = Problem.parse(f"f32 {rows}x4096x4096 nk none")
    text = f"avx512_f32_{rows}x48 mc{rows}_nc4128_kc2048 jc_ic_jr_ir pf{ahead}"

    source = render(problem, Candidate.parse(text), family_named("avx512_f32"))

    assert end in source.text


def test_the_row_for_any_cpu_has_no_instruction_of_one() -> None:
    text = (Path(__file__).parent / "scalar.cpp").read_text()

    assert "asm" not in text
    assert "__builtin_ia32" not in text


@pytest.mark.parametrize(
    ("loops", "next_block"),
    [
        ("jc_ic_jr_ir", "is_deeper ? jc : jc + nc"),
        ("ic_jc_jr_ir", "!is_beside && is_deeper ? part.column_begin : jc + nc"),
    ],
)
@pytest.mark.parametrize("m", ["128", "1..128"])
def test_tiles_of_a_part_share_the_panel_that_is_next_there(
    m: str, loops: str, next_block: str
) -> None:
    candidate = Candidate.parse(f"avx2_f32_6x16 mc132_nc112_kc32 {loops} pf_next")
    problem = Problem.parse(f"f32 {m}x200x64 nk none")

    text = render(problem, candidate, family_named("avx2_f32")).text

    assert f"const int64_t next_jc = {next_block};" in text
    assert "next_jc < part.column_end ? next_jc : jc" in text
    assert "const int32_t tiles = static_cast<int32_t>((rows + mr - 1) / mr);" in text
    assert "column + nr < call.end_column ? w + depth * vectors * lanes : call.next_block" in text


@pytest.mark.parametrize(
    ("m", "tile", "heights"),
    [
        ("1..128", "6x32", range(1, 6)),
        ("0..128", "14x32", range(1, 14)),
        # No other rows are left over of these m, or shared by two tiles, as 13 are.
        ("10..14", "12x32", (1, 2, 6, 7, 10, 11)),
        ("12..13", "12x32", (1, 6, 7)),
        ("20..21", "12x32", (8, 9)),  # a whole tile before so many loses nothing
        ("3..3000", "2x32", (1,)),
        ("1..12", "12x32", range(1, 12)),
        ("1..128", "28x16", (1, 2, 4, 8, 16)),  # sums of these: all would be much code
        ("30..32", "28x16", (2, 3, 4, 15, 16)),
    ],
)
def test_rows_left_over_of_a_range_have_a_tile_of_their_height(
    m: str, tile: str, heights: Sequence[int]
) -> None:
    candidate = Candidate.parse(f"avx512_f32_{tile} mc168_nc128_kc64 jc_ic_jr_ir")
    problem = Problem.parse(f"f32 {m}x128x64 nk none")

    text = render(problem, candidate, family_named("avx512_f32")).text

    called = {int(height) for height in re.findall(r"panels<(\d+)>\(call", text)}
    assert called == set(heights)
