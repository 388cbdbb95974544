"""The space: which candidates there are, how many, and which are beside one."""

from math import ceil

import pytest
from spaces import cpu, few_tiles, of_tiles

from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.micro_kernel import MicroKernel
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import CATALOG, family_named
from gemm_tuner.space.cores import core_named
from gemm_tuner.space.first import first_choices
from gemm_tuner.space.limits import check_covers

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


@pytest.fixture
def every_third_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a third of the tiles of each family in a space."""
    few_tiles(monkeypatch, 3)


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


def test_scalar_family_completes_the_table() -> None:
    space = Space(problem=Problem.parse("f32 3x3x3"), cpu=cpu("x86_64"))

    assert {candidate.micro_kernel.family for candidate in space.defaults()} == {"scalar_f32"}


@pytest.mark.usefixtures("every_third_tile")
def test_every_loop_order_and_both_blocks_are_in_the_space() -> None:
    space = Space(problem=Problem.parse("f32 2000x2000x512"), cpu=cpu("avx2"))

    blockings = [candidate.blocking for candidate in space.all()]

    assert {blocking.loop_order for blocking in blockings} == set(LoopOrder)
    assert any(blocking.mc < 2000 and blocking.nc < 2000 for blocking in blockings)
    assert len({blocking.nc for blocking in blockings if blocking.nc < 2000}) > 1


@pytest.mark.usefixtures("every_third_tile")
def test_packed_x_stays_in_the_cache() -> None:
    machine = cpu("avx512")
    space = Space(problem=Problem.parse("f32 0..16384x64x128"), cpu=machine)

    for candidate in space.all():
        blocking = candidate.blocking
        if blocking.pack_x:
            assert blocking.mc * blocking.kc * 4 <= machine.caches.l2_bytes


def tiles_that_fetch(shape: str) -> set[str]:
    """Return the tiles that fetch the next panel in their first choices, on AVX-512."""
    space = Space(problem=Problem.parse(f"f32 {shape}"), cpu=cpu("avx512"))
    return {one.micro_kernel.text for one in space.defaults() if one.blocking.prefetch_next_panel}


@pytest.mark.parametrize(
    ("shape", "fetching", "not_fetching"),
    [
        ("256x4096x4096", {"avx512_f32_8x48", "avx2_f32_6x16"}, set()),
        ("12x4096x4096", {"avx2_f32_6x16", "avx2_f32_4x24"}, {"avx2_f32_12x8"}),  # one tile
        # Three lines of a panel in each turn: two tiles fetch two of them.
        ("12x4096x4096", {"avx512_f32_4x48"}, {"avx512_f32_6x48"}),
        ("4x4096x4096", set(), {"avx2_f32_2x32"}),  # so few rows are one tile
        ("1..512x4096x4096", {"avx512_f32_8x48", "avx2_f32_6x16"}, set()),
        ("1..4x4096x4096", set(), {"avx2_f32_2x32"}),
        ("256x256x256", set(), {"avx512_f32_8x48", "avx2_f32_6x16"}),  # the weights stay in L2
    ],
)
def test_next_panel_is_fetched_where_tiles_wait_for_it_and_fetch_all_of_it(
    shape: str, fetching: set[str], not_fetching: set[str]
) -> None:
    found = tiles_that_fetch(shape)

    assert fetching <= found
    assert not found & not_fetching


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
    tiles = [tile for tile in space.tiles() if tile.family.name.startswith("amx")][::3]
    monkeypatch.setattr(Space, "tiles", lambda _space: iter(tiles))

    of_amx = list(space.all())

    assert len({one.blocking.kc for one in of_amx}) > 2
    for candidate in of_amx:
        assert candidate.blocking.kc % family_named(candidate.micro_kernel.family).k_tile == 0


def test_rows_of_x_that_share_sets_are_packed_for_amx() -> None:
    def packs(k: int) -> bool:
        space = Space(problem=Problem.parse(f"bf16 64x128x{k}"), cpu=cpu("amx"))
        tiles = [tile for tile in space.tiles() if tile.family.name == "amx_bf16" and tile.mr == 32]
        return all(first_choices(tile)[0].pack_x for tile in tiles)

    assert packs(4096)
    assert packs(3072)  # 16 of 32 rows share a set
    assert not packs(4000)


def test_tiles_fit_the_registers() -> None:
    for family in CATALOG.values():
        for mr, nr in family.tiles:
            registers = ceil(mr / family.register_rows) * max(1, nr // family.lanes)
            assert registers < family.registers


@pytest.mark.usefixtures("every_third_tile")
def test_blocks_of_k_are_whole_groups_of_weights() -> None:
    space = Space(problem=Problem.parse("bf16_s4 64x64x5000 nk:g128"), cpu=cpu("avx2"))

    depths = {one.blocking.kc for one in space.all()}

    assert len(depths) > 2
    assert all(kc == 5000 or kc % 128 == 0 for kc in depths)


@pytest.mark.usefixtures("every_third_tile")
@pytest.mark.parametrize(("k", "least"), [(600, 128), (100, 100)])
def test_few_rows_of_w_are_not_packed_for_themselves(k: int, least: int) -> None:
    space = Space(problem=Problem.parse(f"matmul f32 32x768x{k} kn"), cpu=cpu("avx2"))

    every = list(space.all())

    assert min(one.blocking.kc for one in every if one.blocking.pack_w) == least
    in_place = next(one for one in every if one.blocking.kc == 8)
    packed = [one.blocking.kc for one in space.neighbours(in_place) if one.blocking.pack_w]
    assert packed
    assert set(packed) == {least}


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
