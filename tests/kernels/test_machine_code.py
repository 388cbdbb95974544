"""What compilers make of kernels: only declared instructions, and no spills where it counts."""

from dataclasses import replace

import pytest
from needs import need_compiler

from gemm_tuner.build.compile import Build, compile_kernels
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.kept_panel import keeps_panel
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.space.model import predict_cycles

pytest.importorskip("iced_x86", reason="needs iced-x86, the disassembler of the extra dev")

from machine_code import disassemble, main_loop, spills, undeclared

ANY_CPU = replace(detect_cpu(), isa=frozenset(IsaFeature))
LONG_EPILOGUE = "bias+gelu_erf+add+silu+tanh"


@pytest.fixture(
    scope="module",
    params=["gcc", *(pytest.param(one, marks=pytest.mark.proof) for one in ("clang", "zig"))],
)
def toolchain(request: pytest.FixtureRequest) -> Toolchain:
    return need_compiler(request.param)


def problem_for(
    family: MicroKernelFamily, *, m: int | None = None, n: int = 192, epilogue: str = "none"
) -> Problem:
    rows = m or (1 if family.layout is PackedLayout.COLUMNS else 64)
    layout = "nk:g64" if family.layout is PackedLayout.GROUPS else "nk"
    types = min(types.text for types in family.types)
    return Problem.parse(f"{types} {rows}x{n}x512 {layout} {epilogue}")


def best_of(family: MicroKernelFamily, problem: Problem) -> Candidate:
    """Return the candidate of the family that the model ranks first."""
    defaults = [
        candidate
        for candidate in Space(problem=problem, cpu=ANY_CPU).defaults()
        if candidate.micro_kernel.family == family.name
    ]
    return min(defaults, key=lambda one: predict_cycles(problem, one, family, ANY_CPU))


def fullest_tiles(family: MicroKernelFamily) -> list[tuple[int, int]]:
    """Return the tiles whose sums and operands fill the most registers."""

    def filled(tile: tuple[int, int]) -> int:
        height, width = tile[0] // family.register_rows, tile[1]
        if family.layout is PackedLayout.COLUMNS:
            return height * width + min(height, width)
        return (height + 1) * width // family.lanes

    most = max(map(filled, family.tiles))
    return [tile for tile in family.tiles if filled(tile) == most]


def kernel_of_tile(family: MicroKernelFamily, mr: int, nr: int) -> tuple[Problem, Candidate]:
    """Return a problem of two tiles each way, and the plainest candidate of these tiles."""
    m, n = 2 * mr, 2 * nr
    candidate = Candidate.parse(f"{family.name}_{mr}x{nr} mc{m}_nc{n}_kc512 jc_ic_jr_ir")
    return problem_for(family, m=m, n=n), candidate


def build_all(chosen: list[tuple[Problem, Candidate]], toolchain: Toolchain) -> list[Build]:
    sources = []
    for problem, candidate in chosen:
        family = CATALOG[candidate.micro_kernel.family]
        sources.append((render(problem, candidate, family), family.isa))
    builds = []
    for (_problem, candidate), build in zip(
        chosen, compile_kernels(sources, toolchain=toolchain), strict=True
    ):
        assert isinstance(build, Build), f"{candidate.text}: {build}"
        builds.append(build)
    return builds


@pytest.mark.proof
def test_kernels_use_only_what_their_families_declare(toolchain: Toolchain) -> None:
    families = [(family, problem_for(family)) for family in CATALOG.values()]
    families += [
        (CATALOG[name], problem_for(CATALOG[name], epilogue=LONG_EPILOGUE))
        for name in ("avx512_f32", "avx2_f32", "scalar_f32")
    ]
    chosen = [(problem, best_of(family, problem)) for family, problem in families]

    found = [
        (family.name, wrong)
        for (family, _problem), build in zip(families, build_all(chosen, toolchain), strict=True)
        if (wrong := undeclared(disassemble(build.binary), family.isa))
    ]

    assert not found


def test_an_undeclared_instruction_is_found(toolchain: Toolchain) -> None:
    family = CATALOG["avx512_bf16"]
    problem = problem_for(family)
    (build,) = build_all([(problem, best_of(family, problem))], toolchain)

    found = undeclared(disassemble(build.binary), family.isa - {IsaFeature.AVX512_BF16})

    assert found
    assert all("vdpbf16ps" in one or "vcvtne" in one for one in found)
    assert all("AVX512_BF16" in one for one in found)


@pytest.mark.proof
def test_main_loops_keep_their_vectors_in_registers(toolchain: Toolchain) -> None:
    chosen = [
        kernel_of_tile(family, mr, nr)
        for family in CATALOG.values()
        if family.lanes > 1
        for mr, nr in fullest_tiles(family)
    ]

    builds = build_all(chosen, toolchain)
    found = {
        candidate.micro_kernel.text: spills(main_loop(disassemble(build.binary)))
        for (_problem, candidate), build in zip(chosen, builds, strict=True)
    }

    assert found == {candidate.micro_kernel.text: [] for _problem, candidate in chosen}


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
    source = render(problem, candidate, family)

    (build,) = compile_kernels([(source, family.isa)], toolchain=toolchain)

    assert isinstance(build, Build)
    assert spills(main_loop(disassemble(build.binary)))
