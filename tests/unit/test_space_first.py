"""What is tried first of a tile, and what a search reaches from there."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from spaces import cpu, one_tile

from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.cores import CORES, core_named
from gemm_tuner.space.ranking import ranked, shortlist


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
    shape: str, tile: str, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Space(problem=Problem.parse(f"f32 {shape}"), cpu=cpu("avx512"), threads=2)
    one_tile(monkeypatch, f"avx512_f32_{tile}")

    first = space.defaults()[0].blocking

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
    shape: str,
    tile: str,
    first: set[int],
    cold: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = f"avx512_f32_{tile}"
    one_tile(monkeypatch, text)

    def streams(candidates: Iterable[Candidate]) -> set[int]:
        return {one.blocking.w_streams for one in candidates if one.micro_kernel.text == text}

    space = Space(problem=Problem.parse(f"f32 {shape}"), cpu=cpu("avx512"))
    start = space.defaults()[0]

    assert streams(space.defaults()) == first
    assert streams(replace(space, regime=Regime.COLD_WEIGHTS).defaults()) == cold
    assert cold <= streams(space.neighbours(start))


@pytest.mark.parametrize("m", [4, 13, 64])
@pytest.mark.parametrize(("tile", "streams"), [("4x32", 1), ("4x64", 2), ("4x96", 3), ("4x80", 0)])
def test_tiles_read_as_many_panels_of_a_given_format_as_they_are_wide(
    m: int, tile: str, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_tile(monkeypatch, f"avx512_f32_{tile}")
    like = Candidate.parse("avx512_f32_8x32 mc64_nc768_kc768 jc_ic_jr_ir")
    problem = Problem.parse(f"f32 {m}x768x768")
    space = Space(problem=problem, cpu=cpu("avx512"), like=like)

    found = {one.blocking.w_streams for one in space.all()}

    assert found == ({streams} if streams else set())


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
    ("shape", "tile", "words"),
    [
        ("256x4096x4096", "8x48", ["kc2048 pack_x", "kc512"]),  # rows of x share L1 sets
        ("256x4096x4096", "4x96", ["kc1024 pack_x", "kc512"]),  # or a panel would fill L2
        ("8x4096x4096", "8x48", ["kc2048", "kc512"]),
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


@pytest.mark.parametrize(
    ("text", "regime", "ahead"),
    [
        ("f32 128x128x512", Regime.HOT, {0}),
        ("f32 128x128x512", Regime.COLD_WEIGHTS, {8192}),
        ("f32 64x64x48", Regime.COLD_WEIGHTS, {0}),
        ("f32 16x4096x4096", Regime.HOT, {16384}),
        ("f32 4x4096x4096", Regime.HOT, {0, 16384}),
        ("f32 1x2304x768", Regime.HOT, {0, 4096}),
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


@pytest.mark.parametrize(
    ("problem", "tile", "first"),
    [
        ("197x2304x768", "32x32", "mc224_nc160_kc768 jc_ic_ir_jr pf_next"),
        ("256x4096x4096", "32x32", "mc256_nc256_kc512 ic_jc_ir_jr pack_x pf_next"),
        ("512x4096x1024", "16x32", "mc512_nc256_kc1024 jc_ic_ir_jr"),
        ("128x256x768", "32x32", "mc128_nc256_kc768 jc_ic_ir_jr"),  # L2 keeps the weights
        ("16x1024x4096", "16x32", "mc16_nc1024_kc1024 jc_ic_jr_ir pack_x pf16384"),
    ],
)
def test_rows_of_x_meet_weights_that_pass_with_amx(
    problem: str, tile: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    amx = core_named("sapphire_rapids").cpu
    one_tile(monkeypatch, f"amx_bf16_{tile}")

    space = Space(problem=Problem.parse(f"bf16 {problem}"), cpu=amx)

    assert space.defaults()[0].text == f"amx_bf16_{tile} {first}"
