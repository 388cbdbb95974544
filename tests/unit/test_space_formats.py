"""A space of one format of packed weights: what reads it, and what does not."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from spaces import cpu, of_tiles

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.packed_format import packed_format
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import NoKernelFamily
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.cores import core_named
from gemm_tuner.space.ranking import shortlist


@pytest.mark.parametrize(
    ("shape", "like"),
    [
        ("1x96x1100", "avx512_f32_8x48 mc8_nc96_kc560 jc_ic_jr_ir"),
        pytest.param(
            "9x100x70",
            "avx512_f32_1x48 mc1_nc144_kc70 jc_ic_jr_ir u4",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            "8x16x600",
            "avx512_f32_1x16 mc1_nc16_kc304 jc_ic_jr_ir grid1x1x2",
            marks=pytest.mark.proof,
        ),
        ("1x7x70", "avx512_f32_dot_3x2 mc3_nc8_kc70 jc_ic_jr_ir"),
    ],
)
def test_a_space_can_be_cut_down_to_one_format_of_packed_weights(shape: str, like: str) -> None:
    problem, example = Problem.parse(f"f32 {shape}"), Candidate.parse(like)

    def format_of(candidate: Candidate) -> str:
        return packed_format(problem, candidate, family_named(candidate.micro_kernel.family))

    whole = Space(problem=problem, cpu=cpu("avx512"), threads=2)
    cut = replace(whole, like=example)

    found = set(cut.all())
    own = {one for one in whole.all() if format_of(one) == format_of(example)}
    assert own <= found
    # Where panels are given, tiles of several of them are worth trying that are not otherwise.
    assert all(one.blocking.w_streams > 1 for one in found - own)
    assert {format_of(one) for one in found} == {format_of(example)}
    for start in cut.defaults():
        assert {start, *cut.neighbours(start)} <= found


@pytest.mark.parametrize(
    ("problem", "like", "start", "reached"),
    [
        (
            "f32 2x3072x768",
            "avx2_f32_4x16 mc4_nc3072_kc768 jc_ic_jr_ir",
            "avx2_f32_2x16 mc2_nc3072_kc768 jc_ic_jr_ir u4",
            "avx2_f32_2x32 mc2_nc3072_kc768 jc_ic_jr_ir ws2",
        ),
        (  # weights in L2 gain as much from sums that do not wait for each other
            "f32 1x48x80",
            "avx2_f32_1x32 mc1_nc64_kc80 jc_ic_jr_ir ws2",
            "avx2_f32_1x32 mc1_nc64_kc80 jc_ic_jr_ir ws2 u4",
            "avx2_f32_1x48 mc1_nc48_kc80 jc_ic_jr_ir ws3 u4",
        ),
        (  # panels of tiles of AMX are always 16 columns wide
            "bf16 4x768x768",
            "amx_bf16_16x32 mc16_nc768_kc768 jc_ic_jr_ir",
            "avx512_bf16_4x16 mc4_nc768_kc768 jc_ic_jr_ir",
            "avx512_bf16_4x32 mc4_nc768_kc768 jc_ic_jr_ir ws2",
        ),
    ],
)
def test_few_rows_reach_tiles_of_several_panels_of_a_format(
    problem: str, like: str, start: str, reached: str
) -> None:
    def tiles_of(candidates: Iterable[Candidate]) -> set[tuple[str, int]]:
        return {(one.micro_kernel.text, one.blocking.w_streams) for one in candidates}

    space = Space(problem=Problem.parse(problem), cpu=cpu("amx"), like=Candidate.parse(like))
    wanted = tiles_of([Candidate.parse(reached)])

    assert wanted <= tiles_of(space.defaults())
    assert wanted <= tiles_of(space.neighbours(Candidate.parse(start)))
    assert all(one in space for one in space.neighbours(Candidate.parse(reached)))


def test_a_format_that_no_kernel_reads_is_told() -> None:
    like = Candidate.parse("avx512_f32_dot_1x4 mc1_nc8_kc70 jc_ic_jr_ir")

    with pytest.raises(NoKernelFamily, match="in the format 'f32 32x70 columns k16'"):
        Space(problem=Problem.parse("f32 4x32x70"), cpu=cpu("avx512"), like=like).defaults()


def test_a_format_with_blocks_that_tiles_cannot_have_is_no_format_of_theirs() -> None:
    problem = Problem.parse("u8_s8_s32_f32 128x512x4800 nk none")
    like = Candidate.parse("avx512_int8_12x16 mc132_nc512_kc2400 jc_ic_jr_ir")
    space = Space(problem=problem, cpu=core_named("sapphire_rapids").cpu, like=like)

    families = {one.micro_kernel.family for one in space.defaults()}

    assert "avx512_int8" in families
    assert "amx_int8" not in families


@pytest.mark.parametrize("regime", Regime)
@pytest.mark.parametrize(
    "problem",
    [
        "bf16 128x768x3072 nk bias",
        "bf16 197x2304x768 nk bias",
        "u8_s8_s32_f32 128x3072x768 nk bias",
        "bf16 1x4096x4096 nk none",
        "bf16_u4 1x4096x4096 nk:g128 none",
    ],
)
def test_what_is_tried_first_is_of_its_space_and_has_neighbours(
    problem: str, regime: Regime
) -> None:
    space = Space(
        problem=Problem.parse(problem), cpu=core_named("emerald_rapids").cpu, regime=regime
    )

    for first in shortlist(space, 8):
        assert first in space.cuts_of(first)
        of_tile = of_tiles(space, {first.micro_kernel})
        beside = {
            one.text for one in space.neighbours(first) if one.micro_kernel == first.micro_kernel
        }
        assert beside
        assert beside <= {one.text for one in of_tile}


def test_a_format_of_side_by_side_vectors_in_groups_can_be_searched() -> None:
    space = Space(
        problem=Problem.parse("f32_u4 64x4096x4096 nk:g128 none"),
        cpu=core_named("emerald_rapids").cpu,
        like=Candidate.parse("avx512_vnni_w4_1x64 mc1_nc4096_kc4096 jc_ic_jr_ir ws4"),
    )

    first, *others = space.defaults()

    assert {one.packed_columns for one in (first, *others)} == {16}
    assert space.neighbours(first)
    dice = np.random.default_rng(1)
    drawn = [space.draw(dice) for _ in range(50)]
    assert any(drawn)


def test_few_rows_share_the_panels_of_tiles_of_amx_in_groups() -> None:
    space = Space(
        problem=Problem.parse("bf16_u4 2x4096x4096 nk:g128 none"),
        cpu=core_named("emerald_rapids").cpu,
        like=Candidate.parse("amx_bf16_w4_16x32 mc16_nc4096_kc4096 jc_ic_jr_ir"),
    )

    families = {one.micro_kernel.family for one in space.defaults()}

    assert {"amx_bf16_w4", "avx512_bf16_w4"} <= families
