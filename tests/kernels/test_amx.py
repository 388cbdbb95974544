"""The families with AMX, on a CPU that has it or on an emulated one."""

from collections.abc import Iterator

import pytest
from needs import need_compiler, need_instruction, need_proof
from proof import Subject, prove_all

from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature, parse_isa
from gemm_tuner.domain.micro_kernel import Can, MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import IsaNotUsable
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.space.catalog import CATALOG, family_named

AMX = parse_isa(("amx_tile", "amx_bf16", "amx_int8", "amx_fp16"))
FAMILIES = [family for family in CATALOG.values() if family.register_rows > 1]
INSTRUCTION = Source(text='extern "C" void f() { asm("tdpfp16ps %tmm2, %tmm1, %tmm0"); }\n')
GROUPS = [family for family in FAMILIES if family.layout is PackedLayout.GROUPS]
TYPES = {
    "amx_bf16_w8": ("bf16_u8_f32_bf16", "bf16_s8_f32_f32"),
    "amx_bf16_w4": ("bf16_s4_f32_bf16", "bf16_u4_f32_f32"),
    "amx_bf16": ("bf16", "bf16_bf16_f32_f32"),
    "amx_fp16": ("f16", "f16_f16_f16_f32"),
    "amx_int8": ("u8_s8_s32_u8", "s8_s8_s32_f32", "s8_u8_s32_f32", "u8_u8_s32_f32"),
}


@pytest.fixture(
    params=[family for family in FAMILIES if family not in GROUPS], ids=lambda family: family.name
)
def family(request: pytest.FixtureRequest) -> MicroKernelFamily:
    return usable(request.param)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def any_family(request: pytest.FixtureRequest) -> MicroKernelFamily:
    """Return one of all families; test_groups.py proves tails and groups of those in groups."""
    return usable(request.param)


def usable(family: MicroKernelFamily) -> MicroKernelFamily:
    need_proof(family.isa)
    return family


def subject(
    family: MicroKernelFamily,
    sizes: str,
    *,
    turn: int,
    epilogue: str = "bias",
    tile: str = "32x32",
    extras: str = "",
) -> Subject:
    """Return a problem with a candidate with small blocks; `turn` picks what is proved in turn."""
    texts = TYPES[family.name]
    types = texts[turn % len(texts)]
    orders = list(LoopOrder)
    mr, nr = (int(number) for number in tile.split("x"))
    layout = ("nk", "kn")[turn % 2]
    kc = family.k_tile
    if family in GROUPS:
        layout, kc = f"{layout}:g32", Problem.parse(f"f32 {sizes}").k
    order = orders[turn % len(orders)].value
    return Subject(
        problem=f"{types} {sizes} {layout} {epilogue}",
        candidate=f"{family.name}_{tile} mc{2 * mr}_nc{2 * nr}_kc{kc} {order}{extras}",
    )


@pytest.mark.proof
@pytest.mark.parametrize("compiler", ["gcc", "clang", "zig"])
def test_every_tile_with_every_height(any_family: MicroKernelFamily, compiler: str) -> None:
    toolchain = toolchain_named(compiler, any_family)
    subjects = [
        subject(
            any_family,
            f"0..{2 * mr + 1}x{nr + 1}x{any_family.k_tile + 3}",
            turn=turn,
            tile=f"{mr}x{nr}",
        )
        for turn, (mr, nr) in enumerate(any_family.tiles)
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def toolchain_named(compiler: str, family: MicroKernelFamily) -> Toolchain:
    toolchain = need_compiler(compiler)
    if IsaFeature.AMX_FP16 in family.isa:
        need_instruction(INSTRUCTION, family.isa, toolchain, "AMX-FP16")
    return toolchain


@pytest.mark.proof
def test_tails_of_n_and_k(family: MicroKernelFamily) -> None:
    step = family.k_tile
    depths = (*range(6), step - 1, step, step + 1, 2 * step - 1, 2 * step, 2 * step + 2)
    widths = (0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127)
    tails_of_k = [subject(family, f"0..3x17x{k}", turn=turn) for turn, k in enumerate(depths)]
    tails_of_n = [
        subject(family, f"15..18x{n}x{step + 5}", turn=turn, tile="16x64")
        for turn, n in enumerate(widths)
    ]

    wrong = prove_all([*tails_of_k, *tails_of_n], find_toolchain())

    assert not wrong


@pytest.mark.proof
def test_zeros_lie_behind_packed_rows(any_family: MicroKernelFamily) -> None:
    step = any_family.k_tile
    subjects = [
        subject(any_family, f"0..{mr + 2}x70x{k}", turn=turn, tile=f"{mr}x{nr}", extras=" pack_x")
        for mr, nr in ((16, 16), (32, 32))
        for turn, k in enumerate((1, step - 1, step + 5, 3 * step))
    ]

    wrong = prove_all(subjects, find_toolchain())

    assert not wrong


@pytest.mark.proof
def test_weights_that_pass_rows_in_l1_are_loaded_past_it(family: MicroKernelFamily) -> None:
    """They do if a tile of rows meets all panels of a block that would evict it."""
    step = family.k_tile
    depth, nc = 10 * step, 480
    passing, one_tile, few_weights, passed_by = (
        Subject(
            problem=f"{TYPES[family.name][0]} {sizes}x{depth} nk bias",
            candidate=f"{family.name}_16x48 mc48_nc{nc}_kc{depth} {order}",
        )
        for sizes, order in (
            ("41x475", "jc_ic_ir_jr"),
            ("9x475", "jc_ic_jr_ir"),
            ("41x20", "jc_ic_ir_jr"),
            ("41x475", "jc_ic_jr_ir"),
        )
    )

    subjects = [passing, one_tile, few_weights, passed_by]
    wrong = prove_all(subjects, find_toolchain())

    assert not wrong
    hinted = [one for one in subjects if "tileloaddt1" in source_of(one)]
    assert hinted == [passing, one_tile]


def source_of(chosen: Subject) -> str:
    candidate = Candidate.parse(chosen.candidate)
    family = family_named(candidate.micro_kernel.family)
    return render(Problem.parse(chosen.problem), candidate, family).text


def blocks(family: MicroKernelFamily) -> Iterator[Subject]:
    """Yield candidates that cut everything, with everything that is done beside the products."""
    all_extras: tuple[str, ...] = (
        "",
        " pf4096",
        " pack_x u2",
        " u4 grid2x1",
        " pack_x pf8192 grid1x2",
    )
    if Can.FETCH_NEXT_BLOCK in family.can:
        all_extras += (" pf_next u2", " pack_x pf_next grid1x2")
    for turn, extras in enumerate(all_extras):
        for tile in ("32x32", "16x48"):
            k = 3 * family.k_tile + turn
            yield subject(
                family, f"0..70x100x{k}", turn=turn, epilogue="bias+relu", tile=tile, extras=extras
            )
    for turn, grid in enumerate(("1x1x2", "1x1x3", "2x1x2")):
        k = 4 * family.k_tile + turn
        yield subject(family, f"49x70x{k}", turn=turn, epilogue="silu", extras=f" grid{grid}")


@pytest.mark.proof
def test_blocks_orders_and_extras(family: MicroKernelFamily) -> None:
    wrong = prove_all(blocks(family), find_toolchain())

    assert not wrong


@pytest.mark.proof
def test_epilogues(family: MicroKernelFamily) -> None:
    epilogues = ["none", "bias+gelu_erf+add", "scale+hardswish+add"]
    if family.name == "amx_int8":
        epilogues += ["x_zero_point+row_scale+channel_scale+bias", "x_row_zero_point+scale+tanh"]
    subjects = [
        subject(family, f"0..41x49x{family.k_tile + 7}", turn=turn, epilogue=epilogue)
        for epilogue in epilogues
        for turn in range(len(TYPES[family.name]))
    ]

    wrong = prove_all(subjects, find_toolchain())

    assert not wrong


@pytest.mark.proof
def test_a_tile_is_finished_while_the_next_is_multiplied(family: MicroKernelFamily) -> None:
    """Not one that is alone, nor where slices of k leave unfinished sums."""
    step = family.k_tile
    several, in_blocks, few_steps, alone, sliced = (
        Subject(
            problem=f"{TYPES[family.name][0]} {sizes} nk bias+gelu_erf",
            candidate=f"{family.name}_16x32 mc32_nc64_kc{kc} jc_ic_jr_ir{grid}",
        )
        for sizes, kc, grid in (
            (f"1..70x100x{3 * step}", 3 * step, " grid2x2"),
            (f"70x100x{3 * step}", step, ""),
            ("49x64x3", step, ""),
            (f"16x32x{3 * step}", 3 * step, ""),
            (f"49x64x{2 * step}", step, " grid1x1x2"),
        )
    )

    subjects = [several, in_blocks, few_steps, alone, sliced]
    wrong = prove_all(subjects, find_toolchain())

    assert not wrong
    waiting = [one for one in subjects if "finish_some" in source_of(one)]
    assert waiting == [several, in_blocks, few_steps]


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (
            "            run_part(call, pieces[piece], workspace);\n        finish_some(call, mr);",
            "",
        ),
        ("        finish_some(call, mr);\n        WaitingTile", "        WaitingTile"),
        ("waiting.column = column;", "waiting.column = 0;"),
        ("waiting.next = end;", "waiting.next = end + 1;"),
    ],
    ids=["the last tile", "what is left of a tile", "its columns", "a row"],
)
def test_a_tile_that_is_not_finished_is_found(
    family: MicroKernelFamily, monkeypatch: pytest.MonkeyPatch, part: str, fault: str
) -> None:
    k = family.k_tile + 7  # one turn, which leaves rows of a tile to finish
    chosen = Subject(
        problem=f"{TYPES[family.name][0]} 48x64x{k} nk bias",
        candidate=f"{family.name}_16x32 mc48_nc64_kc{2 * family.k_tile} jc_ic_jr_ir",
    )

    def without(*args: object) -> Source:
        text = render(*args).text  # type: ignore[arg-type]  # handed on
        kept = fault or "            run_part(call, pieces[piece], workspace);"
        changed = text.replace(part, kept)
        assert changed != text
        return Source(text=changed)

    monkeypatch.setattr("proof.render", without)
    wrong = prove_all([chosen], find_toolchain())

    assert wrong[chosen].outcome in {Outcome.WRONG, Outcome.OUT_OF_BOUNDS}


def test_a_row_too_many_is_found(
    family: MicroKernelFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = subject(family, f"17x32x{family.k_tile}", turn=0)
    monkeypatch.setattr("proof.render", _render_with_whole_tiles)

    wrong = prove_all([chosen], find_toolchain())

    assert wrong[chosen].outcome is Outcome.OUT_OF_BOUNDS


def _render_with_whole_tiles(*args: object) -> Source:
    text = render(*args).text  # type: ignore[arg-type]  # handed on
    changed = text.replace("rest < tile_rows ? rest : tile_rows", "tile_rows")
    assert changed != text
    return Source(text=changed)


def test_a_kernel_is_refused_where_the_cpu_lacks_amx() -> None:
    if detect_cpu().isa & AMX:
        pytest.skip("this CPU has AMX")
    chosen = subject(family_named("amx_bf16"), "33x32x32", turn=0)
    candidate = Candidate.parse(chosen.candidate)
    family = family_named(candidate.micro_kernel.family)
    source = render(Problem.parse(chosen.problem), candidate, family)
    build = compile_kernel(source, isa=family.isa, toolchain=find_toolchain())

    with pytest.raises(IsaNotUsable, match="amx_bf16,amx_tile"):
        load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
