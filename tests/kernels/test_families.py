"""Every family, type, tail, block edge, layout, loop order and epilogue step, under guard pages."""

from bisect import bisect
from collections.abc import Iterator
from itertools import pairwise

import pytest
from needs import each_executed, need_compiler
from other_encoding import needed_here
from proof import Subject, prove_all
from rows import (
    FEW_ROWS,
    KC,
    ROWS,
    ROWS_WITH_TAILS,
    Row,
    around,
    candidate_text,
    small_tile,
    usable,
)

from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.micro_kernel import PackedLayout
from gemm_tuner.machine.detect import detect_cpu

pytestmark = pytest.mark.proof  # test_cover.py proves something of each

OF_PANELS = [row for row in FEW_ROWS if row.family.layout is PackedLayout.PANELS]
OF_VECTORS = [
    row for row in FEW_ROWS if row.family.template.name == "outer_product" and row.family.lanes > 1
]
SHUFFLING = [row for row in FEW_ROWS if row.family.can_shuffle(row.types.x)]
# One row for each way to write y.
STREAMING = {
    (row.family.name, row.types.y): row for row in ROWS if row.family.can_stream(row.types.y)
}.values()
READ_ALONE = [row for row in ROWS if not row.types.is_weight_only or row in FEW_ROWS]

EXTRAS = (" pf1024", " pack_x pf_next u2", " u4 grid2x1", " pack_x pf8192 u2 grid1x2")


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_toolchain()


def stride_of_tails(row: Row) -> int:
    """Return of how many tails one is proved, besides those at edges.

    Every third size leaves every remainder by the lanes or the step of k, which are powers of two.
    """
    return 1 if row.is_plain else 3


def tails_of_n(row: Row) -> list[int]:
    """Return numbers of columns up to two tiles, which is a block."""
    _mr, nr = small_tile(row.family)
    return sorted({*range(0, 2 * nr + 2, stride_of_tails(row)), *around(nr, 2 * nr)})


def tails_of_k(row: Row) -> list[int]:
    """Return depths up to two blocks, and those around groups that are deeper.

    A dot product has all: for it, these are the tails of its first vectors.
    """
    family = row.family
    stride = 1 if family.layout is PackedLayout.COLUMNS else stride_of_tails(row)
    edges = around(KC, 2 * KC, family.k_multiple, 2 * family.k_multiple)
    return sorted({*range(0, 2 * KC + 2, stride), *edges})


@pytest.mark.parametrize("row", each_executed(ROWS_WITH_TAILS))
def test_tails_of_n_for_any_m(row: Row, toolchain: Toolchain) -> None:
    mr, nr = small_tile(row.family)
    subjects = [
        Subject(
            problem=row.problem(f"0..{2 * mr + 1}x{n}x{k}", "nk", "x_zero_point+bias"),
            candidate=candidate_text(row, k),
        )
        for n in tails_of_n(row)
        for k in ((0, KC + 1) if row.is_plain and n in around(nr) else (KC + 1,))
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def epilogues(row: Row) -> Iterator[str]:
    """Yield every step alone, and enough chains that each step follows and precedes another."""
    yield from STEP_KINDS
    yield from ("clamp:-0.5:6", "leaky_relu:0.2", "none")
    if row.is_plain:
        for first, second in pairwise([*STEP_KINDS, *STEP_KINDS]):
            yield f"{first}+{second}"
    yield "bias+gelu_erf+add"
    yield "add+scale+mul+add+bias+silu+add+scale"


def depths_and_epilogues(row: Row) -> Iterator[tuple[int, str, str]]:
    """Yield every tail of k, and every epilogue with a depth whose sums are not too alike.

    Where offsets make a step of the tail, neither is the proof of the other: each comes by itself.
    Packing transposes w once for each depth.
    """
    depths = tails_of_k(row)
    steps = list(dict.fromkeys(usable(text, row.types) for text in epilogues(row)))
    shallow = bisect(depths, KC // 2)
    if row.types.accumulator.is_integer:
        shallow = len(depths)
    yield from ((k, "nk", "x_row_zero_point+bias") for k in depths[:shallow])
    deep = depths[shallow:] or [KC + 1]
    for number in range(max(len(deep), len(steps))):
        layout = "nk" if number < len(deep) else row.layout_as_packed
        yield deep[number % len(deep)], layout, steps[number % len(steps)]


@pytest.mark.parametrize("row", each_executed(FEW_ROWS))
def test_tails_of_k_and_every_epilogue_step_for_any_m(row: Row, toolchain: Toolchain) -> None:
    mr, nr = small_tile(row.family)
    subjects = [
        Subject(
            problem=row.problem(f"0..{2 * mr + 1}x{nr + 1}x{k}", layout, epilogue),
            candidate=candidate_text(row, k),
        )
        for k, layout, epilogue in depths_and_epilogues(row)
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


@pytest.mark.parametrize("row", each_executed(FEW_ROWS))
def test_exact_m_around_tiles_and_blocks(row: Row, toolchain: Toolchain) -> None:
    mr, nr = small_tile(row.family)
    orders = list(LoopOrder)
    subjects = [
        Subject(
            problem=row.problem(f"{m}x{2 * nr + 3}x{KC + 5}", "kn", "bias+relu"),
            candidate=candidate_text(row, KC + 5, order=orders[m % len(orders)], extras=extras),
        )
        for m in around(mr, 2 * mr, 4 * mr)
        for extras in (("", " pack_x") if row.is_plain else (("", " pack_x")[m % 2],))
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def layouts(row: Row, turn: int) -> tuple[str, ...]:
    """Return the layouts of w for an order of the loops, which packing does not depend on."""
    if turn == 0 and row.is_plain:
        return "nk", "kn"
    return (("nk", "kn")[turn] if turn < 2 else row.layout_as_packed,)


@pytest.mark.parametrize("row", each_executed(FEW_ROWS))
def test_loop_orders_layouts_and_extras(row: Row, toolchain: Toolchain) -> None:
    mr, nr = small_tile(row.family)
    k = 3 * KC + 2
    subjects = [
        Subject(
            problem=row.problem(
                f"{4 * mr + 1}x{4 * nr + nr // 2 + 1}x{k}", layout, "row_scale+bias+add"
            ),
            candidate=candidate_text(row, k, order=order, extras=extras),
        )
        for turn, order in enumerate(LoopOrder)
        for layout in layouts(row, turn)
        for extras in (EXTRAS if row.is_plain else (EXTRAS[turn % 4], EXTRAS[(turn + 1) % 4]))
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


@pytest.mark.parametrize("row", each_executed(OF_VECTORS))
def test_tiles_read_panels_side_by_side(row: Row, toolchain: Toolchain) -> None:
    lanes = row.family.lanes
    k = 2 * KC + 3
    subjects = [
        Subject(
            problem=row.problem(f"3x{n}x{k}", layout, "bias"),
            candidate=candidate_text(row, k, tile=(2, 4 * lanes), extras=extras),
        )
        for n, layout, extras in (
            (4 * lanes + 3 * lanes + 1, "nk", " pf_next ws2"),
            (4 * lanes + 2 * lanes - 1, "kn", " ws4 u2 grid1x2"),
        )
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


@pytest.mark.parametrize("row", each_executed(STREAMING))
def test_y_is_written_past_the_caches(row: Row, toolchain: Toolchain) -> None:
    k = 4 * KC
    columns = 2 * row.family.lanes
    subjects = [
        Subject(
            problem=row.problem(f"{m}x{n}x{k}", "nk", "bias+relu"),
            candidate=candidate_text(row, k, tile=(4, columns), extras=f" stream_y{extras}"),
        )
        for m, n, extras in (
            (11, 3 * columns, " grid1x2"),
            (4, columns + row.family.lanes - 1, ""),
            ("0..9", columns, " u2"),
        )
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


@pytest.mark.parametrize("row", each_executed(SHUFFLING))
def test_rows_of_x_are_shuffled(row: Row, toolchain: Toolchain) -> None:
    step, lanes = row.family.k_step, row.family.lanes
    subjects = [
        Subject(
            problem=row.problem(f"{m}x{lanes}x{k}", "nk", "bias"),
            candidate=candidate_text(row, k, tile=(8, lanes), extras=f"{extras} shuffle_x"),
        )
        for m, k, extras in ((8, 4 * step, ""), (22, 9 * step - 1, " pack_x"), ("0..9", 2 * KC, ""))
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


@pytest.mark.parametrize("row", each_executed(OF_PANELS))
def test_slices_of_k(row: Row, toolchain: Toolchain) -> None:
    mr, nr = small_tile(row.family)
    kc = max(KC, row.family.k_multiple)
    ways = (
        (LoopOrder.JC_IC_JR_IR, "", "x_row_zero_point+row_scale+bias+gelu_erf"),
        (LoopOrder.IC_JC_IR_JR, " pack_x", "add"),
    )
    subjects = [
        Subject(
            problem=row.problem(f"{sizes}x{k}", "nk", epilogue),
            candidate=candidate_text(row, k, order=order, extras=f"{pack_x} grid{grid}"),
        )
        for sizes in (f"{2 * mr + 1}x{2 * nr + nr // 2 + 1}", f"0..{mr + 1}x{nr}")
        for turn, (k, grid) in enumerate(
            ((2 * kc, "1x1x2"), (4 * kc + 3, "1x1x3"), (4 * kc, "2x1x2"))
        )
        for order, pack_x, epilogue in (ways if row.is_plain else (ways[turn % 2],))
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def tiles_for_a_range_of_m(row: Row) -> list[tuple[int, int]]:
    """Return of some widths the highest tile, and of f32 one of middle height for each width."""
    widths = sorted({nr for _mr, nr in row.family.tiles})
    chosen = []
    for nr in widths if row.is_plain else widths[::2]:
        heights = [mr for mr, width in row.family.tiles if width == nr]
        middle = heights[len(heights) // 2] if row.is_plain else max(heights)
        chosen += [(mr, nr) for mr in {max(heights), middle}]
    return chosen


@pytest.mark.parametrize("row", each_executed(FEW_ROWS))
def test_every_height_of_a_tile_for_a_range_of_m(row: Row, toolchain: Toolchain) -> None:
    k = max(KC, row.family.k_step) + 3
    subjects = [
        Subject(
            problem=row.problem(f"0..{2 * mr + 1}x{nr + 1}x{k}", row.layout_as_packed, "relu"),
            candidate=candidate_text(row, k, tile=(mr, nr)),
        )
        for mr, nr in tiles_for_a_range_of_m(row)
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


@pytest.mark.parametrize("row", each_executed(FEW_ROWS))
def test_every_other_register_tile(row: Row, toolchain: Toolchain) -> None:
    """A range of m has this number of rows among others: its tiles are proved above."""
    proved = tiles_for_a_range_of_m(row)
    k = max(KC, row.family.k_step) + 3
    subjects = [
        Subject(
            problem=row.problem(f"{mr + 1}x{nr + 1}x{k}", row.layout_as_packed, "relu"),
            candidate=candidate_text(row, k, tile=(mr, nr)),
        )
        for mr, nr in row.family.tiles[:: row.stride_of_tiles]
        if (mr, nr) not in proved
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


QUANTISED = (
    "x_zero_point+row_scale+channel_scale+bias+relu",
    "x_row_zero_point+row_scale+channel_scale+bias+gelu_erf+scale+y_zero_point",
)


def is_first_to_read(row: Row) -> bool:
    """Say whether it is the first row that reads these types: others write y in another way."""
    return row == next(
        other
        for other in ROWS
        if (other.family, other.types.x, other.types.w) == (row.family, row.types.x, row.types.w)
    )


@pytest.mark.parametrize("row", each_executed(READ_ALONE))
def test_quantised_layers_of_every_type(row: Row, toolchain: Toolchain) -> None:
    mr, nr = small_tile(row.family)
    layers = (
        (2 * mr + 1, nr + 1, 67, "kn", " pack_x", QUANTISED[1]),
        (mr, nr, 1, "nk", "", QUANTISED[0]),
        (1, 1, 300, "nk", "", QUANTISED[1]),
    )
    subjects = [
        Subject(
            problem=row.problem(f"{m}x{n}x{k}", layout, epilogue),
            candidate=candidate_text(row, k, extras=extras),
        )
        for m, n, k, layout, extras, epilogue in (layers if is_first_to_read(row) else layers[:1])
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def rows_for_compilers() -> Iterator[Row]:
    """Yield each family with each type of x and w; of y, bytes have three where signs matter."""
    for row in ROWS:
        types = row.types
        is_mixed = types.x is DType.U8
        y_is_with_mixed = types.y in {DType.F32, DType.U8, DType.S8}
        if not types.x.is_integer or types.w is DType.U8 or is_mixed is y_is_with_mixed:
            yield row


OTHER_COMPILERS = [one for one in ("gcc", "clang", "zig") if one != find_toolchain().name]


@pytest.mark.parametrize("compiler", OTHER_COMPILERS)
def test_every_family_with_every_other_compiler(compiler: str) -> None:
    """All other tests are the proof with the compiler that is found first."""
    toolchain = need_compiler(compiler)
    subjects = [
        Subject(
            problem=row.problem(f"5x{2 * row.family.lanes + 3}x37", "nk", "bias+gelu_erf+add"),
            candidate=candidate_text(row, 37),
        )
        for row in rows_for_compilers()
        if needed_here(row.isa) <= detect_cpu().isa
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong
