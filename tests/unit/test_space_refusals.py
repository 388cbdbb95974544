"""What no kernel can have is refused, with the word and what to do."""

import pytest
from spaces import cpu

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidCandidate, NoKernelFamily
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.limits import check_covers


def test_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(InvalidCandidate, match="avx1024_f32"):
        family_named("avx1024_f32")


@pytest.mark.parametrize(
    ("types", "text", "word"),
    [
        ("f32", "avx512_f32_1x16 mc1_nc16_kc64 jc_ic_jr_ir ws32", "ws32"),
        ("f32", "avx512_f32_1x48 mc1_nc48_kc64 jc_ic_jr_ir ws2", "ws2"),
        ("f32", "avx512_f32_dot_1x4 mc1_nc4_kc64 jc_ic_jr_ir ws2", "ws2"),
        ("f32", "avx512_f32_dot_1x4 mc1_nc4_kc64 jc_ic_jr_ir pf_next", "pf_next"),
        ("f32", "avx2_f32_1x16 mc1_nc16_kc64 jc_ic_jr_ir shuffle_x", "shuffle_x"),
        ("bf16", "amx_bf16_32x32 mc32_nc32_kc64 jc_ic_jr_ir shuffle_x", "shuffle_x"),
        ("f32", "avx512_f32_1x16 mc2_nc16_kc64 jc_ic_jr_ir convert_once", "convert_once"),
        (
            "f16",
            "avx512_f16_by_f32_1x32 mc2_nc32_kc64 jc_ic_jr_ir convert_once ws2",
            "convert_once",
        ),
        ("f16", "avx512_f16_dot_1x4 mc2_nc4_kc64 jc_ic_jr_ir convert_once", "convert_once"),
        ("f32", "avx2_f32_1x16 mc1_nc16_kc64 jc_ic_jr_ir stream_y", "stream_y"),
        ("f32", "avx512_f32_1x16 mc1_nc16_kc32 jc_ic_jr_ir stream_y", "stream_y"),
        ("bf16", "avx512_bf16_by_f32_1x16 mc1_nc16_kc64 jc_ic_jr_ir stream_y", "stream_y"),
        (
            "f32",
            "avx512_f32_1x16 mc2_nc16_kc32 jc_ic_jr_ir grid1x1x3",
            "grid of 3 slices for 2 blocks of k",
        ),
        (
            "f32",
            "avx512_f32_dot_1x4 mc1_nc4_kc64 jc_ic_jr_ir grid1x1x2",
            "grid of 2 slices for 1 blocks of k",
        ),
    ],
)
def test_words_that_a_kernel_does_not_have_are_refused(types: str, text: str, word: str) -> None:
    with pytest.raises(InvalidCandidate, match=f"has no {word}; leave the word out"):
        check_covers(Problem.parse(f"{types} 1x64x64 nk none"), Candidate.parse(text))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("avx512_w8_2x32 mc4_nc32_kc64 jc_ic_ir_jr convert_once", "convert_once"),
        ("avx512_w8_2x32 mc4_nc32_kc64 jc_ic_jr_ir pf_next", "pf_next"),
        ("avx512_w8_2x32 mc4_nc32_kc48 jc_ic_jr_ir", "blocks of 48 steps of k"),
    ],
)
def test_what_weights_in_groups_do_not_allow_is_refused(text: str, word: str) -> None:
    with pytest.raises(InvalidCandidate, match=f"has no {word}"):
        check_covers(Problem.parse("f32_s8 4x64x64 nk:g32 none"), Candidate.parse(text))


@pytest.mark.parametrize(
    ("problem", "text", "refusal"),
    [
        ("f32 8x8x70", "avx2_f32_4x8 mc6_nc8_kc70", "blocks of 6 rows, which must be whole tiles"),
        ("f32 8x8x70", "avx2_f32_4x8 mc8_nc7_kc70", "7 columns, .*; choose a multiple of 8"),
        (
            "int8 8x16x70",
            "avx2_int8_4x16 mc4_nc16_kc35",
            "35 steps of k, .*; choose a multiple of 2",
        ),
        (
            "bf16 16x64x70",
            "amx_bf16_16x16 mc16_nc64_kc34",
            "34 steps of k, .*; choose a multiple of 32",
        ),
        (
            "f32 1x8x70",
            "avx2_f32_dot_1x4 mc1_nc8_kc16",
            "16 steps of k for a dot product.*; choose 70",
        ),
    ],
)
def test_blocks_of_parts_of_tiles_are_refused(problem: str, text: str, refusal: str) -> None:
    with pytest.raises(InvalidCandidate, match=refusal):
        check_covers(Problem.parse(f"{problem} nk none"), Candidate.parse(f"{text} jc_ic_jr_ir"))


def test_tiles_multiply_whole_steps_of_keys() -> None:
    problem = Problem.parse("attention bf16 128x128x64 scale")

    with pytest.raises(InvalidCandidate, match=r"blocks of 48 keys, .*; choose a multiple of 32"):
        check_covers(problem, Candidate.parse("amx_bf16_16x16 mc16_nc48_kc64 ic_jc_jr_ir pack_w"))


def test_a_fixed_order_refuses_what_adds_in_another() -> None:
    problem = Problem.parse("f32 4x64x4096 nk none fixed")

    with pytest.raises(InvalidCandidate, match=r"these do: avx512_f32, avx2_f32\."):
        check_covers(problem, Candidate.parse("avx2_f32_dot_1x4 mc4_nc64_kc4096 jc_ic_jr_ir"))
    with pytest.raises(InvalidCandidate, match="grid of 2 slices of k with a fixed order"):
        check_covers(
            problem, Candidate.parse("avx2_f32_4x16 mc4_nc64_kc2048 jc_ic_jr_ir grid1x1x2")
        )
    with pytest.raises(NoKernelFamily):
        Space(problem=problem, cpu=cpu("x86_64")).defaults()
