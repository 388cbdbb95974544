"""Results written past the caches, in rows that are aligned and rows that are not."""

import pytest
from proof import Subject, prove_all

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidCandidate
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.space.catalog import family_named

FAMILIES = {
    "avx512_f32": "f32",
    "avx2_f32": "f32",
    "avx512_int8": "s8_s8_s32_s32",
    "avx2_w4": "f32_s4_f32_f32",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_y_is_right_at_any_alignment(name: str) -> None:
    family = family_named(name)
    missing = family.isa - detect_cpu().isa
    if missing:
        pytest.skip(f"this CPU lacks {sorted(missing)}")
    nr = 2 * family.lanes
    groups = ":g32" if "s4" in FAMILIES[name] else ""
    epilogues = ("none",) if "s32" in FAMILIES[name] else ("bias+add", "silu")
    subjects = [
        Subject(
            problem=f"{FAMILIES[name]} 7x{columns}x37 nk{groups} {epilogue}",
            candidate=f"{name}_3x{nr} mc6_nc{2 * nr}_kc40 jc_ic_jr_ir stream_y grid2x1",
        )
        # Rows of whole vectors, and rows that the proof's padding of 3 elements makes so.
        for columns in (3 * nr, 3 * nr - 3)
        for epilogue in epilogues
    ]

    wrong = prove_all(subjects, find_toolchain())

    assert not wrong


def test_only_elements_of_four_bytes_are_streamed() -> None:
    family = family_named("avx512_bf16")
    candidate = Candidate.parse("avx512_bf16_4x32 mc4_nc32_kc8 jc_ic_jr_ir stream_y")

    with pytest.raises(InvalidCandidate, match=r"bf16 past the caches; leave out stream_y"):
        render(Problem.parse("bf16 4x32x8"), candidate, family)
