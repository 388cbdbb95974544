"""What compilers make of kernels: only declared instructions, and no spills where it counts."""

from dataclasses import replace

import pytest

from gemm_tuner.build.compile import Build, compile_kernels
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import ToolchainMissing
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import CATALOG
from gemm_tuner.space.model import predict_cycles

pytest.importorskip("iced_x86", reason="needs iced-x86, the disassembler of the extra dev")

from machine_code import disassemble, main_loop, spills, undeclared

ANY_CPU = replace(detect_cpu(), isa=frozenset(IsaFeature))
LONG_EPILOGUE = "bias+gelu_erf+add+silu+tanh"


@pytest.fixture(scope="module", params=["gcc", "clang", "zig"])
def toolchain(request: pytest.FixtureRequest) -> Toolchain:
    try:
        return find_toolchain(request.param)
    except ToolchainMissing as missing:
        pytest.skip(str(missing))


def problem_for(family: MicroKernelFamily, epilogue: str = "none") -> Problem:
    rows = 1 if family.layout is PackedLayout.COLUMNS else 64
    layout = "nk:g64" if family.layout is PackedLayout.GROUPS else "nk"
    types = min(types.text for types in family.types)
    return Problem.parse(f"{types} {rows}x192x512 {layout} {epilogue}")


def best_with_a_free_register(family: MicroKernelFamily, problem: Problem) -> Candidate:
    """Return the candidate that the model ranks first of those that do not use every register."""

    def fits(candidate: Candidate) -> bool:
        tile = candidate.micro_kernel
        vectors = tile.nr if family.layout is PackedLayout.COLUMNS else tile.nr // family.lanes
        used = tile.mr // family.register_rows * vectors + vectors + 1
        used += family.partial_steps > 0  # gcc keeps one more where sums are moved now and then
        return tile.family == family.name and used < family.registers

    defaults = filter(fits, Space(problem=problem, cpu=ANY_CPU).defaults())
    return min(defaults, key=lambda one: predict_cycles(problem, one, family, ANY_CPU))


def build_all(
    chosen: list[tuple[MicroKernelFamily, Problem]], toolchain: Toolchain
) -> list[tuple[MicroKernelFamily, Build]]:
    sources = [
        (render(problem, best_with_a_free_register(family, problem), family), family.isa)
        for family, problem in chosen
    ]
    built = []
    for (family, _problem), build in zip(
        chosen, compile_kernels(sources, toolchain=toolchain), strict=True
    ):
        assert isinstance(build, Build), f"{family.name}: {build}"
        built.append((family, build))
    return built


def test_kernels_use_only_what_their_families_declare(toolchain: Toolchain) -> None:
    chosen = [(family, problem_for(family)) for family in CATALOG.values()]
    chosen += [
        (CATALOG[name], problem_for(CATALOG[name], LONG_EPILOGUE))
        for name in ("avx512_f32", "avx2_f32", "scalar_f32")
    ]

    found = [
        (family.name, wrong)
        for family, build in build_all(chosen, toolchain)
        if (wrong := undeclared(disassemble(build.binary), family.isa))
    ]

    assert not found


def test_an_undeclared_instruction_is_found(toolchain: Toolchain) -> None:
    family = CATALOG["avx512_bf16"]
    ((_family, build),) = build_all([(family, problem_for(family))], toolchain)

    found = undeclared(disassemble(build.binary), family.isa - {IsaFeature.AVX512_BF16})

    assert found
    assert all("vdpbf16ps" in one or "vcvtne" in one for one in found)
    assert all("AVX512_BF16" in one for one in found)


def test_main_loops_keep_their_vectors_in_registers(toolchain: Toolchain) -> None:
    """Weights in groups are left out: unpacking takes registers as the compiler likes."""
    families = [
        family
        for family in CATALOG.values()
        if family.lanes > 1 and family.layout is not PackedLayout.GROUPS
    ]

    built = build_all([(family, problem_for(family)) for family in families], toolchain)
    found = {family.name: spills(main_loop(disassemble(build.binary))) for family, build in built}

    assert found == {family.name: [] for family in families}


def test_a_spill_is_found(toolchain: Toolchain) -> None:
    """Seven vectors of seven rows are more sums than there are registers."""
    family = CATALOG["avx512_f32"]
    problem = problem_for(family)
    candidate = Candidate.parse("avx512_f32_7x112 mc63_nc112_kc512 jc_ic_jr_ir")
    source = render(problem, candidate, family)

    (build,) = compile_kernels([(source, family.isa)], toolchain=toolchain)

    assert isinstance(build, Build)
    assert spills(main_loop(disassemble(build.binary)))
