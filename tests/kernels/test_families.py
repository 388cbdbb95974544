"""Every family, tail, block edge, layout, loop order and epilogue step, under guard pages."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from proof import Subject, prove_all

from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.errors import ToolchainMissing
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.space.catalog import CATALOG

KC = 16


@pytest.fixture(params=list(CATALOG.values()), ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> MicroKernelFamily:
    family: MicroKernelFamily = request.param
    missing = family.isa - detect_cpu().isa
    if missing:
        pytest.skip(f"this CPU lacks {sorted(missing)}")
    return family


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_toolchain()


def small_tile(family: MicroKernelFamily) -> tuple[int, int]:
    """Return a tile of several rows and more than one vector, so that tails have all forms."""
    wanted = 2 if family.layout is PackedLayout.COLUMNS else 2 * family.lanes
    return max(
        (tile for tile in family.tiles if tile[1] == wanted and tile[0] <= 3),
        default=family.tiles[1],
    )


def around(*edges: int) -> list[int]:
    return sorted(
        {edge + offset for edge in (0, *edges) for offset in (-1, 0, 1) if edge + offset >= 0}
    )


def candidate_text(
    family: MicroKernelFamily,
    k: int,
    *,
    order: LoopOrder = LoopOrder.JC_IC_JR_IR,
    extras: str = "",
    tile: tuple[int, int] | None = None,
) -> str:
    mr, nr = tile or small_tile(family)
    kc = max(k, 1) if family.layout is PackedLayout.COLUMNS else KC
    return f"{family.name}_{mr}x{nr} mc{2 * mr}_nc{2 * nr}_kc{kc} {order.value}{extras}"


def test_tails_of_n_and_k_for_any_m(family: MicroKernelFamily, toolchain: Toolchain) -> None:
    mr, nr = small_tile(family)
    subjects = [
        Subject(problem=f"f32 0..{2 * mr + 1}x{n}x{k} nk bias", candidate=candidate_text(family, k))
        for n in around(nr, 2 * nr)
        for k in around(KC, 2 * KC)
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def test_exact_m_around_tiles_and_blocks(family: MicroKernelFamily, toolchain: Toolchain) -> None:
    mr, nr = small_tile(family)
    orders = list(LoopOrder)
    subjects = [
        Subject(
            problem=f"f32 {m}x{2 * nr + 3}x{KC + 5} kn bias+relu",
            candidate=candidate_text(family, KC + 5, order=orders[m % len(orders)], extras=extras),
        )
        for m in around(mr, 2 * mr, 4 * mr)
        for extras in ("", " pack_x")
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def test_loop_orders_layouts_and_extras(family: MicroKernelFamily, toolchain: Toolchain) -> None:
    mr, nr = small_tile(family)
    k = 3 * KC + 2
    subjects = [
        Subject(
            problem=f"f32 {4 * mr + 1}x{4 * nr + nr // 2 + 1}x{k} {layout} bias+add",
            candidate=candidate_text(family, k, order=order, extras=extras),
        )
        for order in LoopOrder
        for layout in ("nk", "kn")
        for extras in (" pf4096", " pack_x u2", " u4 grid2x1", " pack_x pf8192 u2 grid1x2")
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def test_every_register_tile(family: MicroKernelFamily, toolchain: Toolchain) -> None:
    k = KC + 3
    subjects = [
        Subject(
            problem=f"f32 {mr + 1}x{nr + 1}x{k} nk relu",
            candidate=candidate_text(family, k, tile=(mr, nr)),
        )
        for mr, nr in family.tiles[:: 1 if len(family.tiles) < 40 else 3]
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def epilogues() -> Iterator[str]:
    """Yield every step alone, and enough chains that each step follows and precedes another."""
    yield from STEP_KINDS
    yield from ("clamp:-0.5:6", "leaky_relu:0.2", "none")
    for first, second in pairwise([*STEP_KINDS, *STEP_KINDS]):
        yield f"{first}+{second}"
    yield "bias+gelu_erf+add"
    yield "add+scale+mul+add+bias+silu+add+scale"


def test_every_epilogue_step(family: MicroKernelFamily, toolchain: Toolchain) -> None:
    mr, nr = small_tile(family)
    k = KC + 1
    subjects = [
        Subject(
            problem=f"f32 0..{mr + 1}x{nr + 1}x{k} nk {epilogue}",
            candidate=candidate_text(family, k),
        )
        for epilogue in dict.fromkeys(epilogues())
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


@pytest.mark.parametrize("compiler", ["gcc", "clang", "zig"])
def test_every_family_with_every_compiler(compiler: str) -> None:
    subjects = [
        Subject(
            problem=f"f32 5x{2 * family.lanes + 3}x37 nk bias+gelu_erf+add",
            candidate=candidate_text(family, 37),
        )
        for family in CATALOG.values()
        if family.isa <= detect_cpu().isa
    ]

    try:
        toolchain = find_toolchain(compiler)
    except ToolchainMissing as missing:
        pytest.skip(str(missing))

    wrong = prove_all(subjects, toolchain)

    assert not wrong
