"""What compilers make of kernels: only declared instructions, and no spills where it counts."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from axis_words import words_of
from halves import only_one_part
from needs import need_compiler
from rows import small_tile

from gemm_tuner.build.compile import Build, compile_kernels
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import F32, DType
from gemm_tuner.domain.kept_panel import keeps_panel
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.source import Source
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.space.model import predict_cycles

pytest.importorskip("iced_x86", reason="needs iced-x86, the disassembler of the extra dev")

from machine_code import disassemble, main_loop, spills, undeclared

Tile = tuple[int, int]

ANY_CPU = replace(detect_cpu(), isa=frozenset(IsaFeature))
LONG_EPILOGUE = "bias+gelu_erf+add+silu+tanh+y_zero_point"
WORDS_OF_INSTRUCTIONS = ("pack_x", "convert_once", "shuffle_x", "stream_y")
# The first family of a template and a length of vectors, whose loops those of the others are like.
FIRST_FAMILIES = {
    (family.template.name, family.lanes): family for family in reversed(CATALOG.values())
}.values()
# The families whose whole kernels are looked at. clang and zig are two versions of one compiler.
FAMILIES_OF_COMPILERS = {"gcc": slice(None), "clang": slice(0, None, 2), "zig": slice(1, None, 2)}


@pytest.fixture(
    scope="module",
    params=["gcc", *(pytest.param(one, marks=pytest.mark.proof) for one in ("clang", "zig"))],
)
def toolchain(request: pytest.FixtureRequest) -> Toolchain:
    return need_compiler(request.param)


def problem_for(
    family: MicroKernelFamily,
    *,
    m: int | None = None,
    n: int = 192,
    epilogue: str = "none",
    types: str | None = None,
) -> Problem:
    rows = m or (1 if family.layout is PackedLayout.COLUMNS else 64)
    layout = "nk:g64" if family.layout is PackedLayout.GROUPS else "nk"
    types = types or min(one.text for one in family.types)
    return Problem.parse(f"{types} {rows}x{n}x512 {layout} {epilogue}")


def best_of(family: MicroKernelFamily, problem: Problem) -> Candidate:
    """Return the candidate of the family that the model ranks first."""
    defaults = [
        candidate
        for candidate in Space(problem=problem, cpu=ANY_CPU).defaults()
        if candidate.micro_kernel.family == family.name
    ]
    return min(defaults, key=lambda one: predict_cycles(problem, one, family, ANY_CPU))


def fullest_tiles(family: MicroKernelFamily) -> list[Tile]:
    """Return the tiles whose sums and operands fill the most registers."""

    def filled(tile: Tile) -> int:
        height, width = tile[0] // family.register_rows, tile[1]
        if family.layout is PackedLayout.COLUMNS:
            return height * width + min(height, width)
        return (height + 1) * width // family.lanes

    most = max(map(filled, family.tiles))
    return [tile for tile in family.tiles if filled(tile) == most]


def tiles_for(compiler: str, family: MicroKernelFamily) -> list[Tile]:
    """Return the tiles whose main loops are looked at: with gcc all, or half of them by turns.

    Half are of families that are like the first of their template. clang and zig share the tiles.
    """
    tiles = fullest_tiles(family)
    stride = (1 if compiler == "gcc" else 2) * (1 if family in FIRST_FAMILIES else 2)
    turn = list(CATALOG).index(family.name) + (compiler == "zig")
    return tiles[turn % stride :: stride] or tiles[:1]


def kernel_of_tile(family: MicroKernelFamily, mr: int, nr: int) -> tuple[Problem, Candidate]:
    """Return a problem of two tiles each way, and the plainest candidate of these tiles."""
    m, n = 2 * mr, 2 * nr
    candidate = Candidate.parse(f"{family.name}_{mr}x{nr} mc{m}_nc{n}_kc512 jc_ic_jr_ir")
    return problem_for(family, m=m, n=n), candidate


def kernel_that_says_all(family: MicroKernelFamily) -> tuple[Problem, Candidate]:
    """Return a kernel with tails, and all words that have instructions of their own.

    Families of f32 compute functions, which are the same for all of the same vectors. Families of
    bytes write bytes; bf16 is written by those of bf16. A zero point of y is behind an instruction
    that rounds.
    """
    mr, nr = small_tile(family)
    types = max((one.text for one in family.types if one.y is DType.U8), default=None)
    epilogue = LONG_EPILOGUE if F32 in family.types else "bias+add+y_zero_point"
    problem = problem_for(family, m=2 * mr, n=2 * nr + 3, epilogue=epilogue, types=types)
    said = [word for word in WORDS_OF_INSTRUCTIONS if word in words_of(family, problem)]
    blocks = f"{family.name}_{mr}x{nr} mc{2 * mr}_nc{2 * nr}_kc512"
    return problem, Candidate.parse(" ".join([blocks, "jc_ic_jr_ir", *said]))


def build_all(
    chosen: list[tuple[Problem, Candidate]],
    toolchain: Toolchain,
    respell: Callable[[Source], Source] = only_one_part,
) -> list[Build]:
    """Compile kernels, of which `respell` leaves something: the loops of one part."""
    sources = []
    for problem, candidate in chosen:
        family = CATALOG[candidate.micro_kernel.family]
        sources.append((respell(render(problem, candidate, family)), family.isa))
    builds = []
    for (_problem, candidate), build in zip(
        chosen, compile_kernels(sources, toolchain=toolchain), strict=True
    ):
        assert isinstance(build, Build), f"{candidate.text}: {build}"
        builds.append(build)
    return builds


def test_an_undeclared_instruction_is_found(toolchain: Toolchain) -> None:
    family = CATALOG["avx512_bf16"]
    problem = problem_for(family)
    (build,) = build_all([(problem, best_of(family, problem))], toolchain)

    found = undeclared(disassemble(build.binary), family.isa - {IsaFeature.AVX512_BF16})

    assert found
    assert all("vdpbf16ps" in one or "vcvtne" in one for one in found)
    assert all("AVX512_BF16" in one for one in found)


@pytest.mark.proof
def test_kernels_use_what_is_declared_and_main_loops_keep_their_vectors_in_registers(
    toolchain: Toolchain,
) -> None:
    """What is in a kernel besides its main loop is looked at with few registers in use."""
    plain = [
        kernel_of_tile(family, mr, nr)
        for family in CATALOG.values()
        if family.lanes > 1
        for mr, nr in tiles_for(toolchain.name, family)
    ]
    families = list(CATALOG.values())[FAMILIES_OF_COMPILERS[toolchain.name]]
    whole = list(map(kernel_that_says_all, families))
    chosen = [*plain, *whole]

    builds = [*build_all(plain, toolchain), *build_all(whole, toolchain, lambda source: source)]
    codes = [disassemble(build.binary) for build in builds]
    wrong = {
        candidate.text: features
        for (_problem, candidate), code in zip(chosen, codes, strict=True)
        if (features := undeclared(code, CATALOG[candidate.micro_kernel.family].isa))
    }
    spilled = {
        candidate.text: found
        for (_problem, candidate), code in zip(plain, codes[: len(plain)], strict=True)
        if (found := spills(main_loop(code)))
    }

    assert not wrong
    assert not spilled


def test_kept_panels_stay_in_registers(toolchain: Toolchain) -> None:
    chosen = [
        (
            Problem.parse(f"{types} 66x128x{k} nk bias+relu"),
            Candidate.parse(f"{family}_6x{nr} mc66_nc128_kc{k} jc_ic_jr_ir"),
        )
        for family, types, nr, k in (
            ("avx512_f32", "f32", 64, 4),
            ("avx512_f32", "f32", 16, 26),
            ("avx512_int8", "int8", 64, 16),
            ("avx512_bf16", "bf16", 32, 22),
            ("avx2_f32", "f32", 16, 3),
        )
    ]
    assert all(
        keeps_panel(problem, one, CATALOG[one.micro_kernel.family]) for problem, one in chosen
    )

    builds = build_all(chosen, toolchain)
    found = {
        candidate.text: spills(main_loop(disassemble(build.binary)))
        for (_problem, candidate), build in zip(chosen, builds, strict=True)
    }

    assert found == {candidate.text: [] for _problem, candidate in chosen}


def test_a_tile_without_a_free_register_keeps_its_sums(toolchain: Toolchain) -> None:
    chosen = [
        (
            Problem.parse(f"f32 8x48x512 nk none {reduction}".strip()),
            Candidate.parse(f"avx2_f32_4x24 mc8_nc48_kc512 jc_ic_jr_ir {unrolled}".strip()),
        )
        for reduction in ("", "fixed")
        for unrolled in ("", "u2", "u4")
    ]

    found = [spills(main_loop(disassemble(build.binary))) for build in build_all(chosen, toolchain)]

    assert found == [[]] * len(chosen)


@pytest.mark.parametrize("tile", ["avx512_int8_6x64", "avx512_int8_dot_2x8", "avx2_int8_3x16"])
def test_bytes_of_y_are_narrowed_as_vectors(tile: str, toolchain: Toolchain) -> None:
    problem = Problem.parse("u8_s8_s32_u8 66x64x64 nk bias+scale+y_zero_point")
    candidate = Candidate.parse(f"{tile} mc66_nc64_kc64 jc_ic_jr_ir")

    (build,) = build_all([(problem, candidate)], toolchain)

    moved = [one for one in map(str, disassemble(build.binary)) if one.startswith("vpinsrb")]
    assert not moved


def test_a_spill_is_found(toolchain: Toolchain) -> None:
    """Seven vectors of seven rows are more sums than there are registers."""
    family = CATALOG["avx512_f32"]
    problem = problem_for(family)
    candidate = Candidate.parse("avx512_f32_7x112 mc63_nc112_kc512 jc_ic_jr_ir")

    (build,) = build_all([(problem, candidate)], toolchain)

    assert spills(main_loop(disassemble(build.binary)))
