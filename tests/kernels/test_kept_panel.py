"""Panels that registers keep: every family that can, its tails, and epilogues of all kinds."""

from collections.abc import Iterator

import pytest
from grids import grid_toolchain
from needs import each_executed
from proof import Subject, prove_all

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.kept_panel import keeps_panel, panel_fits_registers
from gemm_tuner.domain.micro_kernel import MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.space.cores import core_named

EPILOGUE_OF_BYTES = "x_row_zero_point+channel_scale+bias+clamp:0:6+scale"
QUICK = ("avx512_f32", "avx2_f32")
FAMILIES = [
    family
    for family in CATALOG.values()
    if family.template.name == "outer_product" and family.lanes > 1 and not family.partial_steps
]


def problem_of(types: OperandTypes, sizes: str) -> str:
    epilogue = EPILOGUE_OF_BYTES if types.accumulator.is_integer else "bias+relu+add"
    if types.y is DType.S32:
        epilogue = "x_zero_point"
    return f"{types.text} {sizes} kn {epilogue}"


def kept_panels(family: MicroKernelFamily) -> Iterator[tuple[str, int]]:
    """Yield problems, each with the width of a tile.

    Each way to read x and w comes with every depth and width. A panel is kept the same whatever
    becomes of the sums, and sums are written the same however deep they are: every other way to
    write y comes once, with the widest panel that fits.
    """
    step = family.k_step
    read = set()
    for types in sorted(family.types, key=lambda types: types.text):
        is_first = (types.x, types.w) not in read
        read.add((types.x, types.w))
        depths = sorted({1, 2 * step - 1, 2 * step, 3 * step}) if is_first else [2 * step]
        for turn, k in enumerate(depths):
            for nr in (2 * family.lanes, family.lanes):
                has_tails = not is_first or turn % 2 == nr // family.lanes % 2
                sizes = f"0..7x{nr + 1}x{k}" if has_tails else f"9x{2 * nr}x{k}"
                problem = problem_of(types, sizes)
                if panel_fits_registers(Problem.parse(problem), family, nr):
                    yield problem, nr
                    if not is_first:
                        break


@pytest.mark.parametrize("family", each_executed(FAMILIES, quick=QUICK))
def test_kept_panels(family: MicroKernelFamily) -> None:
    subjects = []
    for problem, nr in kept_panels(family):
        kc = -(-Problem.parse(problem).k // family.k_step) * family.k_step
        candidate = f"{family.name}_3x{nr} mc6_nc{2 * nr}_kc{kc} jc_ic_jr_ir grid1x2"
        assert keeps_panel(Problem.parse(problem), Candidate.parse(candidate), family)
        subjects.append(Subject(problem=problem, candidate=candidate))

    wrong = prove_all(subjects, grid_toolchain(as_served=family.name in QUICK))

    assert subjects
    assert not wrong


@pytest.mark.parametrize("word", ["u2", "u4", "shuffle_x", "pf4096", "pf_next"])
def test_a_word_that_says_how_k_is_walked_keeps_no_panel(word: str) -> None:
    family = CATALOG["avx512_f32"]
    problem = Problem.parse("f32 64x32x4 nk bias")
    candidate = "avx512_f32_8x16 mc64_nc32_kc4 jc_ic_jr_ir"

    assert keeps_panel(problem, Candidate.parse(candidate), family)
    assert not keeps_panel(problem, Candidate.parse(f"{candidate} {word}"), family)


@pytest.mark.parametrize(
    ("problem", "nr", "fits"),
    [
        ("f32 64x64x4 nk bias", 64, True),
        ("f32 64x64x5 nk bias", 64, False),
        ("f32 64x64x4 nk bias+channel_scale", 64, False),
        ("f32 64x64x4 nk silu", 16, False),
        ("f32 64x64x0 nk bias", 16, False),
    ],
)
def test_a_panel_is_kept_if_it_fits_beside_what_an_epilogue_needs(
    problem: str, nr: int, *, fits: bool
) -> None:
    assert panel_fits_registers(Problem.parse(problem), CATALOG["avx512_f32"], nr) is fits


@pytest.mark.parametrize(
    ("problem", "tile", "unroll"),
    [
        ("int8 64x32x16 nk bias", "avx512_int8_8x32", 1),
        ("int8 64x32x16 nk bias", "avx512_int8_2x32", 1),
        ("int8 64x32x16 nk silu", "avx512_int8_2x32", 4),
        ("f32 64x32x11 nk none", "avx512_f32_8x32", 2),
        ("bf16 64x32x16 nk bias", "avx512_bf16_8x32", 2),
    ],
)
def test_panels_of_few_steps_are_kept_first(problem: str, tile: str, unroll: int) -> None:
    space = Space(problem=Problem.parse(problem), cpu=core_named("zen4").cpu)

    first = next(one for one in space.defaults() if one.micro_kernel.text == tile)

    assert first.blocking.k_unroll == unroll
