"""Every family, type, tail, block edge, layout, loop order and epilogue step, under guard pages."""

from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain, cycle, islice, product, repeat

import pytest
from grids import grid_toolchain
from needs import each_executed, need_compiler
from other_encoding import needed_here
from pairs import all_pairs
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
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.step_kind import OperandShape
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


@pytest.fixture
def toolchain(row: Row) -> Toolchain:
    """Return the compiler of a row: the one that stands for all is compiled as it is served."""
    return grid_toolchain(as_served=row.stands_for_all)


def behind_whole(rests: Iterable[int], whole: int, most: int) -> Iterator[int]:
    """Yield each rest once: alone, or behind up to `most` whole ones, which its code never sees.

    How many these are does not follow a power of two.
    """
    for turn, rest in enumerate(rests):
        yield rest + whole * (turn.bit_count() % (most + 1))


def rests_of_columns(row: Row) -> range:
    """Return the columns that a last tile may have: of f32 all, of others those of one vector."""
    lanes, (_mr, nr) = row.family.lanes, small_tile(row.family)
    return range(1, nr if row.is_plain or lanes == 1 else min(lanes, nr))


def tails_of_n(row: Row) -> list[int]:
    """Return numbers of columns around a tile, and for one family around the block of two tiles.

    With them are the rests that do not come with the depths.
    """
    _mr, nr = small_tile(row.family)
    proved = {n - nr for _m, n, *_ in depths_and_epilogues(row)} if row in FEW_ROWS else set()
    rests = set(rests_of_columns(row)) - proved
    return sorted({*rests, *around(nr, *([2 * nr] if row.stands_for_all else []))})


def tails_of_k(row: Row) -> list[int]:
    """Return depths of up to two blocks with every rest, and those around groups that are deeper.

    A dot product has one block, and another tail for each number of elements in its last vector.
    Others but f32 have every third: all remainders by the step of k and the eight that packing
    moves at once. Compilers unroll short loops: of f32 in panels, every depth of one block comes.
    """
    family = row.family
    whole, stride = KC, 1 if row.is_plain else 3
    if family.layout is PackedLayout.COLUMNS:
        whole, stride = family.k_step, 1
    rests = range(0, min(whole, 2 * KC + 2), stride)
    first = range(KC) if row.is_plain and family.layout is PackedLayout.PANELS else ()
    edges = around(KC, 2 * KC, family.k_multiple, 2 * family.k_multiple)
    return sorted({*behind_whole(rests, whole, 1), *first, *edges})


def rows_for_tail(row: Row, *, is_special: bool) -> str:
    """Return the m that a tail is proved with: tiles of all heights for those that are special."""
    mr, _nr = small_tile(row.family)
    return f"0..{2 * mr + 1}" if is_special else f"{2 * mr}"


@pytest.mark.parametrize("row", each_executed(ROWS_WITH_TAILS))
def test_tails_of_n_for_any_m(row: Row, toolchain: Toolchain) -> None:
    _mr, nr = small_tile(row.family)
    depths: dict[int, tuple[int, ...]] = dict.fromkeys(tails_of_n(row), (KC + 1,))
    if row.is_plain:
        depths |= dict.fromkeys(around(nr) if row.stands_for_all else (nr + 1,), (0, KC + 1))
    subjects = [
        Subject(
            problem=row.problem(
                f"{rows_for_tail(row, is_special=n in {nr - 1, nr + 1})}x{n}x{k}",
                *("nk", "x_zero_point+bias"),
            ),
            candidate=candidate_text(row, k),
        )
        for n, depths_of_n in depths.items()
        for k in depths_of_n
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def epilogues(row: Row) -> Iterator[str]:
    """Yield every step alone for f32, and chains in which each follows another and precedes one.

    Steps compute in f32 whatever y is, with the vectors of a family, and read operands of a shape
    alike. Of other types, each row has a third of the steps, by turns, and operands of each shape;
    so have dot products of f32, with every step that has an operand.
    """
    steps = [*STEP_KINDS, "clamp:-0.5:6", "leaky_relu:0.2", "none"]
    third = steps[FEW_ROWS.index(row) % 3 :: 3]
    if row.stands_for_all or (row.is_plain and row.family.lanes == 1):
        yield from steps
    elif row.is_plain:
        have_operand = (
            name for name, kind in STEP_KINDS.items() if kind.operand is not OperandShape.NONE
        )
        yield from dict.fromkeys([*have_operand, *third])
    else:
        yield from third
    if row.stands_for_all:
        names = list(STEP_KINDS)
        for first in range(0, len(names), 2):
            yield "+".join([*names, *names][first : first + 3])
    yield "bias+gelu_erf+add"
    yield "add+scale+mul+row_scale+add+bias+silu+add+scale"


def depths_and_epilogues(row: Row) -> Iterator[tuple[str, int, int, str, str]]:
    """Yield m, n, k, the layout of w and an epilogue.

    Every tail of k comes, and every epilogue with a depth whose sums are not too alike. Offsets,
    which have sums of each depth, come with all of them. Packing transposes w once for each depth.

    Tiles of all heights and with a rest of columns read k alike: depths have one or the other, by
    turns, and of one family both around blocks. Epilogues have a rest of columns.
    """
    mr, nr = small_tile(row.family)
    depths = tails_of_k(row)
    special = around(KC, 2 * KC)
    steps = list(dict.fromkeys(usable(text, row.types) for text in epilogues(row)))
    shallow = bisect(depths, KC // 2)
    deep = depths[shallow:]
    of_depths = chain(
        repeat("x_row_zero_point+bias", shallow),
        (
            step if step == "none" else usable(f"x_row_zero_point+{step}", row.types)
            for step in cycle(steps)
        ),
    )
    rests = cycle(rests_of_columns(row))
    for turn, (k, step) in enumerate(zip(depths, of_depths, strict=False)):
        is_odd, is_edge = turn.bit_count() % 2 == 1, k in special
        has_both = row.stands_for_all and is_edge
        has_heights = has_both or ((row.is_plain or is_edge) and not is_odd)
        has_rest = has_both or is_odd or turn >= shallow
        n = nr + next(rests) if has_rest else nr
        yield rows_for_tail(row, is_special=has_heights), n, k, "nk", step
    for k, step in zip(cycle(deep or [KC + 1]), steps[len(deep) :], strict=False):
        yield f"{2 * mr}", nr + next(rests), k, row.layout_as_packed, step


@pytest.mark.parametrize("row", each_executed(FEW_ROWS))
def test_tails_of_k_and_every_epilogue_step_for_any_m(row: Row, toolchain: Toolchain) -> None:
    subjects = [
        Subject(
            problem=row.problem(f"{m}x{n}x{k}", layout, epilogue),
            candidate=candidate_text(row, k),
        )
        for m, n, k, layout, epilogue in depths_and_epilogues(row)
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


@pytest.mark.parametrize("row", each_executed(FEW_ROWS))
def test_exact_m_around_tiles_and_blocks(row: Row, toolchain: Toolchain) -> None:
    """Rows are cut the same for all families: one has all numbers of rows, others every third."""
    mr, nr = small_tile(row.family)
    numbers, turn_of_row = around(mr, 2 * mr, 4 * mr), FEW_ROWS.index(row)
    if not row.stands_for_all:
        numbers = numbers[turn_of_row % 3 :: 3]
    # Each order with packed rows and without, by turns.
    ways = list(product(("", " pack_x"), LoopOrder))
    ways = [*ways[::3], *ways[1::3], *ways[2::3]]
    subjects = [
        Subject(
            problem=row.problem(f"{m}x{2 * nr}x{KC + 5}", "kn", "bias+relu"),
            candidate=candidate_text(row, KC + 5, order=order, extras=extras),
        )
        for m, (extras, order) in zip(
            numbers, islice(cycle(ways), turn_of_row % len(ways), None), strict=False
        )
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def orders_and_extras(row: Row) -> Iterator[tuple[LoopOrder, str]]:
    """Yield every order of the loops, for one family with all extras, for others with one each."""
    for turn, order in enumerate(LoopOrder, start=FEW_ROWS.index(row)):
        for extras in EXTRAS if row.stands_for_all else (EXTRAS[turn % len(EXTRAS)],):
            yield order, extras


@pytest.mark.parametrize("row", each_executed(FEW_ROWS))
def test_loop_orders_layouts_and_extras(row: Row, toolchain: Toolchain) -> None:
    """Packing does not depend on them: each layout of w comes, mostly that which is copied."""
    mr, nr = small_tile(row.family)
    k, rest = 3 * KC + 2, int(row.stands_for_all)
    layouts = chain(("nk", "kn"), repeat(row.layout_as_packed))
    subjects = [
        Subject(
            problem=row.problem(
                f"{4 * mr + rest}x{4 * nr + nr // 2 + 1}x{k}", layout, "row_scale+bias+add"
            ),
            candidate=candidate_text(row, k, order=order, extras=extras),
        )
        for layout, (order, extras) in zip(layouts, orders_and_extras(row), strict=False)
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


@pytest.mark.parametrize("row", each_executed(OF_VECTORS))
def test_tiles_read_panels_side_by_side(row: Row, toolchain: Toolchain) -> None:
    """Of one to four rows, at ends of n where each of the panels is the last and narrower."""
    lanes = row.family.lanes
    k = 2 * KC + 3
    subjects = [
        Subject(
            problem=row.problem(f"{m}x{vectors * lanes + rest}x{k}", layout, "bias"),
            candidate=candidate_text(row, k, tile=(mr, width * lanes), extras=extras),
        )
        for (mr, width), m, (vectors, rest), layout, extras in (
            ((2, 4), "3", (7, 1), "nk", " pf_next ws2"),
            ((2, 4), "3", (6, -1), "kn", " ws4 u2 grid1x2"),
            ((2, 4), "1..4", (6, 1), "nk", " pf4096 ws2"),
            ((1, 4), "0..2", (5, 0), "kn", " ws2 u4 grid1x1x2"),
            ((3, 3), "2..7", (5, -1), "kn", " pack_x ws3 grid2x1"),
            ((4, 2), "4", (4, 1), "kn", " pf1024 ws2"),
            ((1, 8), "1", (11, 1), "nk", " ws8 u4"),
            ((2, 6), "2", (9, 0), "kn", " ws6"),
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
    sizes = (f"{2 * mr + 1}x{2 * nr + nr // 2 + 1}", f"0..{mr + 1}x{nr}")
    slices = ((2 * kc, "1x1x2"), (4 * kc + 3, "1x1x3"), (4 * kc, "2x1x2"))
    chosen = all_pairs(slices, sizes, ways)
    if not row.stands_for_all:
        chosen = list(zip(slices, cycle(sizes), cycle(ways), strict=False))
    subjects = [
        Subject(
            problem=row.problem(f"{size}x{k}", "nk", epilogue),
            candidate=candidate_text(row, k, order=order, extras=f"{pack_x} grid{grid}"),
        )
        for (k, grid), size, (order, pack_x, epilogue) in chosen
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def tiles_for_a_range_of_m(row: Row) -> list[tuple[int, int]]:
    """Return the highest tile of some widths, and for one family one of middle height for each.

    Which heights the rows left over have depends on that of the tile alone.
    """
    widths = sorted({nr for _mr, nr in row.family.tiles})
    chosen = []
    for nr in widths if row.stands_for_all else widths[::2]:
        heights = [mr for mr, width in row.family.tiles if width == nr]
        middle = heights[len(heights) // 2] if row.stands_for_all else max(heights)
        chosen += [(mr, nr) for mr in {max(heights), middle}]
    return chosen


def ranges_around_a_tile(row: Row, mr: int) -> list[str]:
    """Return ranges of m with all numbers of rows left over, and for one family with some alone."""
    some = (f"{max(1, mr - 2)}..{mr + 1}", f"{2 * mr + 1}..{2 * mr + 2}")
    return [f"0..{2 * mr + 1}", *(some if row.stands_for_all else ())]


@pytest.mark.parametrize("row", each_executed(FEW_ROWS))
def test_every_height_of_a_tile_for_a_range_of_m(row: Row, toolchain: Toolchain) -> None:
    k = max(KC, row.family.k_step) + 3
    rest = 1 if row.is_plain else 0
    subjects = [
        Subject(
            problem=row.problem(f"{m}x{nr + rest}x{k}", row.layout_as_packed, "relu"),
            candidate=candidate_text(row, k, tile=(mr, nr)),
        )
        for mr, nr in tiles_for_a_range_of_m(row)
        for m in ranges_around_a_tile(row, mr)
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


@pytest.mark.parametrize("row", each_executed(FEW_ROWS))
def test_every_other_register_tile(row: Row, toolchain: Toolchain) -> None:
    """A range of m has this number of rows among others: its tiles are proved above.

    Its tiles of fewer rows are proved there, too.
    """
    proved = tiles_for_a_range_of_m(row)
    k = max(KC, row.family.k_step) + 3
    rest = 1 if row.is_plain else 0
    subjects = [
        Subject(
            problem=row.problem(f"{mr}x{nr + rest}x{k}", row.layout_as_packed, "relu"),
            candidate=candidate_text(row, k, tile=(mr, nr)),
        )
        for mr, nr in row.family.tiles[
            FEW_ROWS.index(row) % row.stride_of_tiles :: row.stride_of_tiles
        ]
        if (mr, nr) not in proved
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


QUANTISED = (
    "x_zero_point+row_scale+channel_scale+bias+relu",
    "x_row_zero_point+row_scale+channel_scale+bias+hardswish+scale+y_zero_point",
)


def first_to(does: Callable[[Row], Hashable]) -> list[Row]:
    """Return the first row of each family that does something."""
    return list({(row.family.name, does(row)): row for row in reversed(READ_ALONE)}.values())


FIRST_TO_READ = first_to(lambda row: (row.types.x, row.types.w))
FIRST_TO_WRITE = first_to(lambda row: (row.types.accumulator, row.types.y))


@pytest.mark.parametrize(
    "row", each_executed(row for row in ROWS if row in FIRST_TO_READ or row in FIRST_TO_WRITE)
)
def test_quantised_layers_of_every_type(row: Row, toolchain: Toolchain) -> None:
    mr, nr = small_tile(row.family)
    layers = [(2 * mr, nr + 1, 67, "kn", " pack_x", QUANTISED[1])]
    if row in FIRST_TO_READ:
        one_step, one_row = (mr, nr, 1), (1, 1, 300)  # by turns
        sizes = (one_step, one_row)[FIRST_TO_READ.index(row) % 2]
        layers.append((*sizes, "nk", "", QUANTISED[0]))
    subjects = [
        Subject(
            problem=row.problem(f"{m}x{n}x{k}", layout, epilogue),
            candidate=candidate_text(row, k, extras=extras),
        )
        for m, n, k, layout, extras, epilogue in layers
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong


def rows_for_compilers() -> Iterator[Row]:
    """Yield each family with each type of x and w; of y, bytes have three where signs matter.

    Floats have the first and the last way to write y by turns.
    """
    of_floats: dict[tuple[MicroKernelFamily, DType, DType], list[Row]] = {}
    for row in ROWS:
        types = row.types
        if types.x.is_integer:
            y_is_with_mixed = types.y in {DType.F32, DType.U8, DType.S8}
            if types.w is DType.U8 or (types.x is DType.U8) is y_is_with_mixed:
                yield row
        else:
            of_floats.setdefault((row.family, types.x, types.w), []).append(row)
    for turn, rows in enumerate(of_floats.values()):
        yield rows[-(turn % 2)]


OTHER_COMPILERS = [one for one in ("gcc", "clang", "zig") if one != find_toolchain().name]


def shared_rows(compiler: str) -> list[Row]:
    """Return the rows for a compiler: clang and zig, versions of one, share those of a family.

    Each has every family.
    """
    of_families: dict[MicroKernelFamily, list[Row]] = {}
    for row in rows_for_compilers():
        of_families.setdefault(row.family, []).append(row)
    first = {"clang": 0, "zig": 1}
    if compiler not in first:
        return [row for rows in of_families.values() for row in rows]
    return [row for rows in of_families.values() for row in rows[first[compiler] :: 2] or rows]


@pytest.mark.parametrize("compiler", OTHER_COMPILERS)
def test_every_family_with_every_other_compiler(compiler: str) -> None:
    """All other tests are the proof with the compiler that is found first."""
    toolchain = need_compiler(compiler)
    subjects = [
        Subject(
            problem=row.problem(
                f"{5 if row in FEW_ROWS else small_tile(row.family)[0]}"
                f"x{2 * row.family.lanes + 3}x37",
                *("nk", "bias+gelu_erf+add"),
            ),
            candidate=candidate_text(row, 37),
        )
        for row in shared_rows(compiler)
        if needed_here(row.isa) <= detect_cpu().isa
    ]

    wrong = prove_all(subjects, toolchain)

    assert not wrong
