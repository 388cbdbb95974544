from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import groupby, islice
from math import ceil

import pytest

from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.cpu import Caches, Cpu, parse_isa
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.micro_kernel import MicroKernel
from gemm_tuner.domain.packed_format import packed_format
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidCandidate, NoKernelFamily
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import CATALOG, family_named
from gemm_tuner.space.cores import CORES, core_named
from gemm_tuner.space.limits import check_covers
from gemm_tuner.space.model import predict_cycles
from gemm_tuner.space.parts import largest_part
from gemm_tuner.space.ranking import ranked, shortlist
from gemm_tuner.space.tile import Tile
from gemm_tuner.space.walk import every_choice

ISA = {
    "amx": (
        *("fma", "avx2", "avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512_bf16"),
        *("avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    ),
    "avx512": ("fma", "avx2", "avx512f", "avx512vl", "avx512bw", "avx512dq"),
    "avx2": ("fma", "avx2", "f16c"),
    "x86_64": (),
}
SHAPES = (
    "0x5x5",
    "5x0x5",
    "5x5x0",
    "1x1x1",
    "17x31x67",
    "5000000x2x1",
    *(
        pytest.param(shape, marks=pytest.mark.proof)
        for shape in ("1..64x96x33", "8x16x600", "1x4096x4096", "512x13x512")
    ),
)


def cpu(isa: str) -> Cpu:
    return Cpu(
        vendor="AuthenticAMD",
        brand="a test CPU",
        family=26,
        model=2,
        stepping=1,
        isa=parse_isa(ISA[isa]),
        caches=Caches(l1d_bytes=48 << 10, l2_bytes=1 << 20, l3_bytes=32 << 20),
        physical_cores=2,
    )


@pytest.fixture
def every_third_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave in a space a third of the tiles of each family: each is walked by itself, all alike."""
    all_tiles = Space.tiles

    def third(space: Space) -> Iterator[Tile]:
        for _family, tiles in groupby(all_tiles(space), key=lambda tile: tile.family.name):
            yield from islice(tiles, 0, None, 3)

    monkeypatch.setattr(Space, "tiles", third)


def of_tiles(space: Space, micro_kernels: Collection[MicroKernel]) -> Iterator[Candidate]:
    """Yield every candidate of some tiles."""
    for tile in space.tiles():
        if tile.micro_kernel in micro_kernels:
            yield from (tile.candidate(choice.blocking) for choice in every_choice(tile))


@pytest.mark.usefixtures("every_third_tile")
@pytest.mark.parametrize("isa", ["avx512", "avx2", "x86_64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_candidate_runs_on_the_cpu_and_divides_its_blocks(isa: str, shape: str) -> None:
    machine = cpu(isa)
    space = Space(problem=Problem.parse(f"f32 {shape}"), cpu=machine, threads=2)

    found = list(space.all())

    assert found
    assert space.size() == len(found) == len({candidate.text for candidate in found})
    for candidate in found:
        tile, blocking = candidate.micro_kernel, candidate.blocking
        assert family_named(tile.family).isa <= machine.isa
        assert blocking.mc % tile.mr == 0
        assert blocking.nc % tile.nr == 0
        assert candidate.parts in {1, 2}


@pytest.mark.usefixtures("every_third_tile")
@pytest.mark.parametrize(
    ("problem", "core", "threads"),
    [
        # A copy of x in fixed point is not copied again.
        pytest.param("f32_s8 32x64x512 nk:g128", "zen4", 2, marks=pytest.mark.proof),
        ("f16 64x40x500 nk", "zen3", 4),
        ("int8 3000x64x30 nk", "zen3", 1),
        pytest.param("bf16 33x64x700 nk", "sapphire_rapids", 2, marks=pytest.mark.proof),
    ],
)
def test_the_size_of_a_space_is_the_number_of_its_candidates(
    problem: str, core: str, threads: int
) -> None:
    space = Space(problem=Problem.parse(problem), cpu=core_named(core).cpu, threads=threads)

    found = [candidate.text for candidate in space.all()]

    assert space.size() == len(found) == len(set(found))


@pytest.mark.parametrize("shape", SHAPES)
def test_neighbours_belong_to_the_space(shape: str) -> None:
    space = Space(problem=Problem.parse(f"f32 {shape}"), cpu=cpu("avx512"))
    found = {start: space.neighbours(start) for start in space.defaults()[:5]}

    everything = [one for neighbours in found.values() for one in neighbours]
    possible = {one.text for one in of_tiles(space, {one.micro_kernel for one in everything})}
    assert {one.text for one in everything} <= possible
    assert all(start not in neighbours for start, neighbours in found.items())


def test_winner_of_one_thread_is_cut_for_two_and_stays_possible() -> None:
    problem = Problem.parse("f32 512x512x512")
    alone = Space(problem=problem, cpu=cpu("avx512")).defaults()[0]

    cuts = Space(problem=problem, cpu=cpu("avx512"), threads=2).cuts_of(alone)

    assert {one.parts for one in cuts} == {1, 2}
    assert cuts[-1] == alone
    assert {one.micro_kernel for one in cuts} == {alone.micro_kernel}


@pytest.mark.parametrize(
    ("shape", "tile", "grid"),
    [
        ("16384x512x128", "4x96", (2, 1)),  # 6 panels, but the last is a third of one
        ("16384x512x128", "14x32", (2, 1)),  # parts of columns would read all of x each
        ("32x11008x4096", "14x32", (1, 2)),
        ("1x4096x4096", "1x128", (1, 2)),
        ("128x768x768", "5x80", (2, 1)),  # 10 panels, but the last is three fifths of one
        ("8x16x600", "8x16", (1, 1)),
    ],
)
def test_a_call_is_first_cut_where_the_largest_part_takes_the_least_time(
    shape: str, tile: str, grid: tuple[int, int]
) -> None:
    space = Space(problem=Problem.parse(f"f32 {shape}"), cpu=cpu("avx512"), threads=2)

    first = next(
        one for one in space.defaults() if one.text.startswith(f"avx512_f32_{tile} ")
    ).blocking

    assert (first.grid_m, first.grid_n) == grid


@pytest.mark.parametrize(
    ("shape", "tile", "first"),
    [
        ("49x512x4608", "9x48 mc54_nc528_kc1536", "grid1x1x2"),  # 5 panels and 6
        ("32x128x16384", "9x48 mc36_nc144_kc2048", "grid1x1x2"),  # 1 and 2, 18 rows and 14
        ("49x512x4608", "10x32 mc50_nc512_kc1536", "grid1x2"),  # 8 panels each
        ("32x128x16384", "8x48 mc32_nc144_kc2048", "grid2x1"),  # 16 rows each
    ],
)
def test_k_is_cut_first_where_tiles_cannot_be_dealt_out_evenly(
    shape: str, tile: str, first: str
) -> None:
    space = Space(problem=Problem.parse(f"f32 {shape}"), cpu=cpu("avx512"), threads=2)

    cuts = space.cuts_of(Candidate.parse(f"avx512_f32_{tile} jc_ic_jr_ir"))

    assert cuts[0].text.endswith(first)


@pytest.mark.proof
@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("k", [4608, 4700, 16384])
def test_slices_of_k_have_as_many_blocks_each(k: int, threads: int) -> None:
    space = Space(problem=Problem.parse(f"f32 9x48x{k}"), cpu=cpu("avx512"), threads=threads)
    tiles = {MicroKernel(family="avx512_f32", mr=mr, nr=nr) for mr, nr in ((9, 48), (3, 16))}
    candidates = list(of_tiles(space, tiles))
    depths = {one.blocking.kc for one in candidates if one.blocking.grid_k == threads}

    assert {one.micro_kernel for one in candidates} == tiles
    assert len(depths) > 1
    for kc in depths:
        assert ceil(k / kc) % threads == 0


def test_model_counts_that_slices_of_k_are_added_up() -> None:
    problem, family = Problem.parse("f32 64x256x1024"), family_named("avx512_f32")

    columns, slices = (
        predict_cycles(
            problem,
            Candidate.parse(f"avx512_f32_4x64 mc64_nc256_kc512 jc_ic_jr_ir {grid}"),
            family,
            cpu("avx512"),
        )
        for grid in ("grid1x2", "grid1x1x2")
    )

    assert 1.005 * columns < slices < 1.05 * columns


def test_the_largest_part_is_as_kernels_cut_it() -> None:
    assert largest_part(512, 96, 2) == 288  # three whole panels; two and a third
    assert largest_part(100, 16, 2) == 52  # three tiles; the last three and a fourth of one
    assert largest_part(10, 16, 2) == 10
    assert largest_part(0, 16, 2) == 0


def test_model_knows_that_a_last_panel_may_be_narrow() -> None:
    problem, machine = Problem.parse("f32 16384x512x128"), cpu("avx512")
    family = family_named("avx512_f32")
    rows, columns = (
        predict_cycles(
            problem,
            Candidate.parse(f"avx512_f32_4x96 mc16384_nc576_kc128 jc_ic_jr_ir {grid}"),
            family,
            machine,
        )
        for grid in ("grid2x1", "grid1x2")
    )

    assert columns > 1.1 * rows


def test_scalar_family_completes_the_table() -> None:
    space = Space(problem=Problem.parse("f32 3x3x3"), cpu=cpu("x86_64"))

    assert {candidate.micro_kernel.family for candidate in space.defaults()} == {"scalar_f32"}


def test_model_prefers_wide_vectors_and_full_tiles() -> None:
    problem = Problem.parse("f32 96x96x96")
    space = Space(problem=problem, cpu=cpu("avx512"))

    best = min(
        space.defaults(),
        key=lambda one: predict_cycles(
            problem, one, family_named(one.micro_kernel.family), space.cpu
        ),
    )

    assert best.micro_kernel.family == "avx512_f32"
    assert best.micro_kernel.mr * best.micro_kernel.nr >= 8 * 16


def test_model_prefers_to_read_streamed_weights_for_all_rows_at_once() -> None:
    problem = Problem.parse("f32 8x4096x4096")
    space = Space(problem=problem, cpu=cpu("avx512"))

    best = min(
        space.defaults(),
        key=lambda one: predict_cycles(
            problem, one, family_named(one.micro_kernel.family), space.cpu
        ),
    )

    assert best.micro_kernel.mr == 8


@pytest.mark.parametrize("shape", ["512x3x512", "512x13x512", "512x24x512"])
def test_model_prefers_dot_products_to_vectors_with_idle_lanes(shape: str) -> None:
    problem = Problem.parse(f"f32 {shape}")
    space = Space(problem=problem, cpu=cpu("avx512"))

    best = min(
        space.defaults(),
        key=lambda one: predict_cycles(
            problem, one, family_named(one.micro_kernel.family), space.cpu
        ),
    )

    assert best.micro_kernel.family == "avx512_f32_dot"


def test_every_loop_order_and_both_blocks_are_in_the_space() -> None:
    space = Space(problem=Problem.parse("f32 2000x2000x512"), cpu=cpu("avx2"))

    blockings = [candidate.blocking for candidate in space.all()]

    assert {blocking.loop_order for blocking in blockings} == set(LoopOrder)
    assert any(blocking.mc < 2000 and blocking.nc < 2000 for blocking in blockings)
    assert len({blocking.nc for blocking in blockings if blocking.nc < 2000}) > 1


def test_packed_x_stays_in_the_cache() -> None:
    machine = cpu("avx512")
    space = Space(problem=Problem.parse("f32 0..16384x64x128"), cpu=machine)

    for candidate in space.all():
        blocking = candidate.blocking
        if blocking.pack_x:
            assert blocking.mc * blocking.kc * 4 <= machine.caches.l2_bytes


@pytest.mark.parametrize(
    ("shape", "tile", "first", "cold"),
    [
        ("1x4096x4096", "1x128", {1, 2}, {1, 2}),
        ("1x2048x2048", "1x128", {1, 2}, {1, 2}),  # half of it
        ("1x1024x1024", "1x128", {1}, {1, 2}),
        ("1x256x256", "1x128", {1}, {1}),
        ("4x4096x4096", "4x80", {1}, {1}),  # of five vectors
        ("4x4096x4096", "4x96", {1, 2}, {1, 2}),
        ("4x1024x1024", "4x48", {1}, {1, 3}),
        ("5x4096x4096", "4x96", {1}, {1}),
    ],
)
def test_few_rows_read_streams_of_weights_that_are_cold_or_fill_l3(
    shape: str, tile: str, first: set[int], cold: set[int]
) -> None:
    def streams(candidates: Iterable[Candidate]) -> set[int]:
        text = f"avx512_f32_{tile}"
        return {one.blocking.w_streams for one in candidates if one.micro_kernel.text == text}

    space = Space(problem=Problem.parse(f"f32 {shape}"), cpu=cpu("avx512"))
    start = next(one for one in space.defaults() if one.micro_kernel.text.endswith(f"_{tile}"))

    assert streams(space.defaults()) == first
    assert streams(replace(space, regime=Regime.COLD_WEIGHTS).defaults()) == cold
    assert cold <= streams(space.neighbours(start))


def test_next_panel_is_fetched_by_many_tiles_that_wait_for_it() -> None:
    def is_fetched(shape: str) -> bool:
        space = Space(problem=Problem.parse(f"f32 {shape}"), cpu=cpu("avx512"))
        return any(one.blocking.prefetch_next_panel for one in space.defaults())

    assert is_fetched("256x4096x4096")
    assert not is_fetched("4x4096x4096")  # too few tiles of rows
    assert not is_fetched("256x256x256")  # the weights stay in L2


@pytest.mark.parametrize(
    ("tile", "ways"),
    [
        ("avx512_f32_16x16", {True, False}),
        ("avx512_f32_4x16", {False}),
        ("avx512_f32_8x32", {False}),
        ("avx512_f32_28x16", {False}),
        ("avx2_f32_8x8", {False}),
    ],
)
def test_only_tiles_that_wait_for_loads_shuffle_x(tile: str, ways: set[bool]) -> None:
    space = Space(problem=Problem.parse("f32 64x32x16"), cpu=cpu("avx512"))

    found = {one.blocking.shuffle_x for one in space.all() if one.micro_kernel.text == tile}

    assert found == ways


@pytest.mark.parametrize(
    ("problem", "orders"),
    [
        ("int8 2048x512x13", {LoopOrder.JC_IC_IR_JR, LoopOrder.JC_IC_JR_IR}),
        ("int8 512x512x13", {LoopOrder.JC_IC_JR_IR}),
        ("int8 2048x512x64", {LoopOrder.JC_IC_JR_IR}),
    ],
)
def test_rows_of_a_large_y_may_be_written_in_order(problem: str, orders: set[LoopOrder]) -> None:
    space = Space(problem=Problem.parse(problem), cpu=core_named("zen4").cpu)

    assert {one.blocking.loop_order for one in shortlist(space, 12)} == orders


def test_tiles_of_few_lines_are_tried_first_where_y_passes_the_caches() -> None:
    space = Space(problem=Problem.parse("int8 16384x512x128"), cpu=core_named("zen4").cpu)

    first = shortlist(space, 12)

    assert all(one.blocking.stream_y for one in first)
    assert all(one.micro_kernel.mr * one.micro_kernel.nr <= 16 * 16 for one in first)


@pytest.mark.parametrize(
    ("shape", "ways"), [("16384x512x128", {True, False}), ("2048x512x13", {False})]
)
def test_y_that_l3_cannot_keep_may_be_written_past_the_caches(shape: str, ways: set[bool]) -> None:
    space = Space(problem=Problem.parse(f"f32 {shape}"), cpu=cpu("avx512"))
    first = next(one for one in space.defaults() if one.micro_kernel.family.startswith("avx512"))

    found = {one.blocking.stream_y for one in [first, *space.neighbours(first)]}

    assert found == ways
    assert first.blocking.stream_y is max(ways)


@pytest.mark.parametrize(
    ("family", "streamed", "kept"),
    [
        ("avx512_int8", {DType.F32, DType.S32}, {DType.S8, DType.U8}),
        ("avx512_bf16", {DType.F32, DType.BF16}, set()),
        ("avx512_bf16_by_f32", {DType.F32}, {DType.BF16}),
        ("avx2_f32", set(), {DType.F32}),
        ("avx512_f32_dot", set(), {DType.F32}),
    ],
)
def test_only_whole_cache_lines_are_written_past_the_caches(
    family: str, streamed: set[DType], kept: set[DType]
) -> None:
    assert {y for y in streamed | kept if family_named(family).can_stream(y)} == streamed


@pytest.mark.parametrize(
    ("shape", "tile", "words"),
    [
        ("256x4096x4096", "8x48", ["kc2048 pack_x", "kc512"]),  # rows of x share L1 sets
        ("256x4096x4096", "4x96", ["kc1024 pack_x", "kc512"]),  # or a panel would fill L2
        ("8x4096x4096", "8x48", ["kc2048 pack_x", "kc512"]),
        ("197x2304x768", "5x80", ["kc768", "kc384"]),
        ("256x256x256", "8x48", ["kc256"]),
    ],
)
def test_blocks_of_k_as_deep_as_l2_allows_are_tried_first_and_shallow_ones_in_place(
    shape: str, tile: str, words: list[str]
) -> None:
    space = Space(problem=Problem.parse(f"f32 {shape}"), cpu=cpu("avx512"))

    found = [
        f"kc{one.blocking.kc}" + " pack_x" * one.blocking.pack_x
        for one in space.defaults()
        if one.micro_kernel.text == f"avx512_f32_{tile}"
    ]

    assert found == words


def test_of_tiles_that_promise_the_same_the_one_with_fewer_loads_is_tried_first() -> None:
    problem, zen_4 = Problem.parse("f32 16x4096x4096"), replace(cpu("avx512"), family=25, model=17)
    wide, narrow = (
        Candidate.parse(f"avx512_f32_{tile} mc20_nc4128_kc2048 jc_ic_jr_ir pf16384")
        for tile in ("8x48", "10x32")
    )

    assert ranked([narrow, wide], problem, zen_4) == [wide, narrow]


def test_panels_are_whole_vectors() -> None:
    space = Space(problem=Problem.parse("bf16 1x8192x8192"), cpu=cpu("avx512"))

    for candidate in space.all():
        lanes = family_named(candidate.micro_kernel.family).lanes
        if candidate.blocking.w_streams > 1:
            assert candidate.packed_columns % lanes == 0


@pytest.mark.parametrize("types", ["f32", "bf16"])
def test_slices_of_k_are_in_the_space_where_y_is_small(types: str) -> None:
    def grids(sizes: str) -> set[int]:
        space = Space(problem=Problem.parse(f"{types} {sizes}"), cpu=cpu("avx512"), threads=4)
        start = space.defaults()[0]
        return {candidate.blocking.grid_k for candidate in space.neighbours(start)}

    assert grids("8x16x16384") == {1, 2, 4}
    assert grids("8x16x300") == {1}
    assert grids("1024x1024x1024") == {1}


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


def test_more_rows_read_one_panel_of_a_format() -> None:
    like = Candidate.parse("avx2_f32_4x16 mc8_nc3072_kc768 jc_ic_jr_ir")
    space = Space(problem=Problem.parse("f32 5x3072x768"), cpu=cpu("avx2"), like=like)

    assert {one.blocking.w_streams for one in space.defaults()} == {1}


def test_panels_side_by_side_are_not_fetched_far_ahead_at_first() -> None:
    like = Candidate.parse("avx2_f32_4x16 mc4_nc3072_kc768 jc_ic_jr_ir")
    space = Space(problem=Problem.parse("f32 2x3072x768"), cpu=cpu("avx2"), like=like)

    first = {
        streams: {
            one.blocking.prefetch_w_bytes
            for one in space.defaults()
            if one.blocking.w_streams == streams
        }
        for streams in (1, 2)
    }

    assert first == {1: {0, 16384}, 2: {0, 1024}}


def test_a_format_that_no_kernel_reads_is_told() -> None:
    like = Candidate.parse("avx512_f32_dot_1x4 mc1_nc8_kc70 jc_ic_jr_ir")

    with pytest.raises(NoKernelFamily, match="in the format 'f32 32x70 columns k16'"):
        Space(problem=Problem.parse("f32 4x32x70"), cpu=cpu("avx512"), like=like).defaults()


def test_tiles_of_amx_are_as_high_as_the_rows_need() -> None:
    def tiles(rows: int, isa: str) -> set[tuple[int, int]]:
        space = Space(problem=Problem.parse(f"bf16 {rows}x256x512"), cpu=cpu(isa))
        kernels = [candidate.micro_kernel for candidate in space.defaults()]
        return {(one.mr, one.nr) for one in kernels if one.family == "amx_bf16"}

    assert tiles(4, "amx") == {(16, 16), (16, 32), (16, 48), (16, 64)}
    assert {(32, 16), (32, 32)} <= tiles(17, "amx")
    assert (48, 16) in tiles(33, "amx")
    assert not tiles(33, "avx512")


@pytest.mark.parametrize("types", ["bf16", "int8"])
def test_blocks_of_k_are_whole_tiles_of_amx(types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(problem=Problem.parse(f"{types} 64x128x5000"), cpu=cpu("amx"), threads=2)
    # The other families have many times as many candidates.
    tiles = [tile for tile in space.tiles() if tile.family.name.startswith("amx")]
    monkeypatch.setattr(Space, "tiles", lambda _space: iter(tiles))

    of_amx = list(space.all())

    assert len({one.blocking.kc for one in of_amx}) > 2
    for candidate in of_amx:
        assert candidate.blocking.kc % family_named(candidate.micro_kernel.family).k_tile == 0


def test_model_prefers_amx_for_many_rows() -> None:
    problem = Problem.parse("bf16 512x1024x1024")
    space = Space(problem=problem, cpu=cpu("amx"))

    best = min(
        space.defaults(),
        key=lambda one: predict_cycles(
            problem, one, family_named(one.micro_kernel.family), space.cpu
        ),
    )

    assert best.micro_kernel.text == "amx_bf16_32x32"


def test_rows_of_x_that_share_sets_are_packed_for_amx() -> None:
    def packs(k: int) -> bool:
        space = Space(problem=Problem.parse(f"bf16 64x128x{k}"), cpu=cpu("amx"))
        defaults = [one for one in space.defaults() if one.micro_kernel.family == "amx_bf16"]
        return all(candidate.blocking.pack_x for candidate in defaults)

    assert packs(4096)
    assert not packs(4000)


def test_tiles_fit_the_registers() -> None:
    for family in CATALOG.values():
        for mr, nr in family.tiles:
            registers = ceil(mr / family.register_rows) * max(1, nr // family.lanes)
            assert registers < family.registers


def test_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(InvalidCandidate, match="avx1024_f32"):
        family_named("avx1024_f32")


def test_a_format_with_blocks_that_tiles_cannot_have_is_no_format_of_theirs() -> None:
    problem = Problem.parse("u8_s8_s32_f32 128x512x4800 nk none")
    like = Candidate.parse("avx512_int8_12x16 mc132_nc512_kc2400 jc_ic_jr_ir")
    space = Space(problem=problem, cpu=core_named("sapphire_rapids").cpu, like=like)

    families = {one.micro_kernel.family for one in space.defaults()}

    assert "avx512_int8" in families
    assert "amx_int8" not in families


@pytest.mark.parametrize(
    ("types", "text", "word"),
    [
        ("f32", "avx512_f32_1x16 mc1_nc16_kc64 jc_ic_jr_ir ws32", "ws32"),
        ("f32", "avx512_f32_1x48 mc1_nc48_kc64 jc_ic_jr_ir ws2", "ws2"),
        ("f32", "avx512_f32_dot_1x4 mc1_nc4_kc64 jc_ic_jr_ir ws2", "ws2"),
        ("f32", "avx512_f32_dot_1x4 mc1_nc4_kc64 jc_ic_jr_ir pf_next", "pf_next"),
        ("f32", "avx2_f32_1x16 mc1_nc16_kc64 jc_ic_jr_ir shuffle_x", "shuffle_x"),
        ("bf16", "amx_bf16_32x32 mc32_nc32_kc64 jc_ic_jr_ir shuffle_x", "shuffle_x"),
        ("f32", "avx512_f32_1x16 mc2_nc16_kc64 jc_ic_jr_ir convert_once", "convert_once"),
        (
            "f16",
            "avx512_f16_by_f32_1x32 mc2_nc32_kc64 jc_ic_jr_ir convert_once ws2",
            "convert_once",
        ),
        ("f16", "avx512_f16_dot_1x4 mc2_nc4_kc64 jc_ic_jr_ir convert_once", "convert_once"),
        ("f32", "avx2_f32_1x16 mc1_nc16_kc64 jc_ic_jr_ir stream_y", "stream_y"),
        ("f32", "avx512_f32_1x16 mc1_nc16_kc32 jc_ic_jr_ir stream_y", "stream_y"),
        ("bf16", "avx512_bf16_by_f32_1x16 mc1_nc16_kc64 jc_ic_jr_ir stream_y", "stream_y"),
        (
            "f32",
            "avx512_f32_1x16 mc2_nc16_kc32 jc_ic_jr_ir grid1x1x3",
            "grid of 3 slices for 2 blocks of k",
        ),
        (
            "f32",
            "avx512_f32_dot_1x4 mc1_nc4_kc64 jc_ic_jr_ir grid1x1x2",
            "grid of 2 slices for 1 blocks of k",
        ),
    ],
)
def test_words_that_a_kernel_does_not_have_are_refused(types: str, text: str, word: str) -> None:
    with pytest.raises(InvalidCandidate, match=f"has no {word}; leave the word out"):
        check_covers(Problem.parse(f"{types} 1x64x64 nk none"), Candidate.parse(text))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("avx512_w8_2x32 mc4_nc32_kc64 jc_ic_ir_jr convert_once", "convert_once"),
        ("avx512_w8_2x32 mc4_nc32_kc64 jc_ic_jr_ir pf_next", "pf_next"),
        ("avx512_w8_2x32 mc4_nc32_kc48 jc_ic_jr_ir", "blocks of 48 steps of k"),
    ],
)
def test_what_weights_in_groups_do_not_allow_is_refused(text: str, word: str) -> None:
    with pytest.raises(InvalidCandidate, match=f"has no {word}"):
        check_covers(Problem.parse("f32_s8 4x64x64 nk:g32 none"), Candidate.parse(text))


@pytest.mark.parametrize(
    ("problem", "text", "refusal"),
    [
        ("f32 8x8x70", "avx2_f32_4x8 mc6_nc8_kc70", "blocks of 6 rows, which must be whole tiles"),
        ("f32 8x8x70", "avx2_f32_4x8 mc8_nc7_kc70", "7 columns, .*; choose a multiple of 8"),
        (
            "int8 8x16x70",
            "avx2_int8_4x16 mc4_nc16_kc35",
            "35 steps of k, .*; choose a multiple of 2",
        ),
        (
            "bf16 16x64x70",
            "amx_bf16_16x16 mc16_nc64_kc34",
            "34 steps of k, .*; choose a multiple of 32",
        ),
        (
            "f32 1x8x70",
            "avx2_f32_dot_1x4 mc1_nc8_kc16",
            "16 steps of k for a dot product.*; choose 70",
        ),
    ],
)
def test_blocks_of_parts_of_tiles_are_refused(problem: str, text: str, refusal: str) -> None:
    with pytest.raises(InvalidCandidate, match=refusal):
        check_covers(Problem.parse(f"{problem} nk none"), Candidate.parse(f"{text} jc_ic_jr_ir"))


@pytest.mark.parametrize(
    ("types", "shape", "layout", "at_first"),
    [
        ("f32_s8", "256x4096x4096", "nk:g128", {False, True}),
        ("f32_s8", "64x512x512", "nk:g128", {False, True}),
        ("f32_s8", "8x4096x4096", "nk:g128", {False}),
        ("f16", "128x768x768", "nk", {False, True}),
        ("f16", "8x512x512", "nk", {False}),
    ],
)
def test_weights_that_many_tiles_meet_are_tried_converted_once(
    types: str, shape: str, layout: str, at_first: set[bool]
) -> None:
    space = Space(problem=Problem.parse(f"{types} {shape} {layout}"), cpu=cpu("avx512"))
    family = "avx512_f16_by_f32" if types == "f16" else "avx512_w8"
    of_tile = [one for one in space.defaults() if one.micro_kernel.text == f"{family}_4x64"]

    assert {one.blocking.convert_once for one in of_tile} == at_first
    ways = {one.blocking.convert_once for one in space.neighbours(of_tile[0])}
    assert ways == {False, True}


@pytest.mark.parametrize(
    ("types", "shape", "is_packed"),
    [
        ("bf16", "128x768x768", True),
        ("f16", "128x768x768", True),
        ("bf16_s4", "128x768x768", True),
        ("int8", "128x768x768", True),
        ("bf16", "4x768x768", False),  # weights decide
        ("bf16", "128x48x768", False),  # few panels
        ("f32", "128x768x768", False),
    ],
)
def test_x_of_many_rows_is_converted_once_for_many_panels(
    types: str, shape: str, *, is_packed: bool
) -> None:
    layout = "nk:g128" if "_" in types else "nk"
    machine = cpu("avx2")
    space = Space(problem=Problem.parse(f"{types} {shape} {layout}"), cpu=machine)
    wide = [one for one in space.defaults() if one.micro_kernel.nr == 16]
    first = next(one for one in wide if "dot" not in one.micro_kernel.family)

    assert first.blocking.pack_x == is_packed
    packed = [one.blocking for one in wide if one.blocking.pack_x]
    assert all(one.mc * one.kc * DType.F32.size_bytes <= machine.caches.l2_bytes for one in packed)


def test_blocks_of_k_are_whole_groups_of_weights() -> None:
    space = Space(problem=Problem.parse("bf16_s4 64x64x5000 nk:g128"), cpu=cpu("avx2"))

    depths = {one.blocking.kc for one in space.all()}

    assert len(depths) > 2
    assert all(kc == 5000 or kc % 128 == 0 for kc in depths)


@pytest.mark.parametrize(
    ("text", "kc"),
    [
        ("f32 1x4096x128 kn", 8),  # rows of 16 KB, read as streams
        ("f32 4x128x4096 kn", 32),
        ("f32 32x768x3072 kn", 128),  # rows of 3 KB share sets of L1
        ("f32 128x64x512 kn", 512),
        ("f32 1x4096x6 kn", 6),  # no more steps than that
    ],
)
def test_blocks_of_a_w_in_place_are_as_deep_as_its_rows_are_short(text: str, kc: int) -> None:
    space = Space(problem=Problem.parse(f"matmul {text}"), cpu=cpu("avx2"))

    first = [one.blocking for one in space.defaults() if "dot" not in one.micro_kernel.family]

    assert {one.kc for one in first if not one.pack_w} == {kc}


@pytest.mark.parametrize(("k", "least"), [(600, 128), (100, 100)])
def test_few_rows_of_w_are_not_packed_for_themselves(k: int, least: int) -> None:
    space = Space(problem=Problem.parse(f"matmul f32 32x768x{k} kn"), cpu=cpu("avx2"))

    every = list(space.all())

    assert min(one.blocking.kc for one in every if one.blocking.pack_w) == least
    in_place = next(one for one in every if one.blocking.kc == 8)
    packed = [one.blocking.kc for one in space.neighbours(in_place) if one.blocking.pack_w]
    assert packed
    assert set(packed) == {least}


@pytest.mark.parametrize(
    ("text", "regime", "ahead"),
    [
        ("f32 128x128x512", Regime.HOT, {0}),
        ("f32 128x128x512", Regime.COLD_WEIGHTS, {8192}),
        ("f32 64x64x48", Regime.COLD_WEIGHTS, {0}),
        ("f32 16x4096x4096", Regime.HOT, {16384}),
        ("f32 4x4096x4096", Regime.HOT, {0, 16384}),
        ("f32 1x2304x768", Regime.HOT, {0}),
        ("bf16 1x2304x768", Regime.HOT, {0, 4096}),  # which is faster depends on the CPU
        ("bf16 1x2304x768", Regime.COLD_WEIGHTS, {0, 1024}),
        ("f32 1x4096x4096", Regime.HOT, {0, 1024}),
        ("f32 2x4096x4096", Regime.HOT, {0, 1024, 16384}),
        ("f32 2x4096x4096", Regime.COLD_WEIGHTS, {0, 1024}),
    ],
)
def test_weights_are_fetched_ahead_at_first_where_they_come_from_afar(
    text: str, regime: Regime, ahead: set[int]
) -> None:
    space = Space(problem=Problem.parse(text), cpu=CORES["zen5"].cpu, regime=regime)

    outer = [
        one.blocking
        for one in space.defaults()
        if one.micro_kernel.nr == 64 and not one.blocking.prefetch_next_panel
    ]

    assert {blocking.prefetch_w_bytes for blocking in outer} == ahead


def test_both_inner_orders_are_tried_first_where_x_passes_by() -> None:
    space = Space(problem=Problem.parse("bf16 16384x512x128"), cpu=CORES["zen5"].cpu)

    orders = {one.blocking.loop_order for one in space.defaults()}

    assert orders == {LoopOrder.JC_IC_IR_JR, LoopOrder.JC_IC_JR_IR}


@pytest.mark.parametrize("isa", ["amx", "avx2"])
@pytest.mark.parametrize("types", ["f32", "bf16", "u8_s8_s32_f32"])
def test_a_fixed_order_has_candidates_that_keep_it_alone(types: str, isa: str) -> None:
    problem = Problem.parse(f"{types} 4x64x4096 nk bias fixed")
    space = Space(problem=problem, cpu=cpu(isa), threads=4)
    found = space.defaults()
    found += [beside for one in found[:8] for beside in space.neighbours(one)]

    for candidate in found:
        family = check_covers(problem, candidate)
        assert family.can_be_fixed
        assert candidate.blocking.grid_k == 1 or types != "f32"
    assert {one.parts for one in found} > {1}


def test_a_fixed_order_refuses_what_adds_in_another() -> None:
    problem = Problem.parse("f32 4x64x4096 nk none fixed")

    with pytest.raises(InvalidCandidate, match=r"these do: avx512_f32, avx2_f32\."):
        check_covers(problem, Candidate.parse("avx2_f32_dot_1x4 mc4_nc64_kc4096 jc_ic_jr_ir"))
    with pytest.raises(InvalidCandidate, match="grid of 2 slices of k with a fixed order"):
        check_covers(
            problem, Candidate.parse("avx2_f32_4x16 mc4_nc64_kc2048 jc_ic_jr_ir grid1x1x2")
        )
    with pytest.raises(NoKernelFamily):
        Space(problem=problem, cpu=cpu("x86_64")).defaults()
