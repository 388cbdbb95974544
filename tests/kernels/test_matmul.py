"""Products of two activations: w comes with each call, read in place or packed in it."""

from collections.abc import Callable
from ctypes import sizeof
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grids import grid_toolchain
from needs import each_executed, need_proof
from numpy.typing import NDArray
from proof import Subject, prove_all
from rows import ROWS, Row, candidate_text
from test_cuts import kernel_of

from gemm_tuner.abi import OK, ArgsStruct
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.in_place import can_read_w_in_place
from gemm_tuner.domain.measurement import Library
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import InvalidArray, InvalidCandidate, InvalidSetting
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.direct import NATIVE
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.cores import core_named
from gemm_tuner.space.limits import check_covers

needs_native = pytest.mark.skipif(
    NATIVE is None, reason="gemm_tuner.runtime._native is not built; run hatch_build.py"
)

OF_ACTIVATIONS = [row for row in ROWS if not row.types.is_weight_only]
FIRST_TO_READ = {
    (row.family.name, row.types.x, row.types.w): row for row in reversed(OF_ACTIVATIONS)
}.values()
PACKED = "scalar_f32_2x4 mc8_nc8_kc16 jc_ic_jr_ir pack_w"
SCORES = "matmul f32 1..40x48x64 nk scale+add"


def subjects_of(row: Row) -> list[Subject]:
    """Return products of a family: layouts, orders of blocks, offsets, packed and in place.

    What comes with a call is read the same however y is written: types that differ in y alone
    share the layouts and orders by turns.
    """
    family = row.family
    (mr, nr), deep = family.tiles[1], 2 * max(16, family.k_multiple)
    ways = (
        ("nk", deep + 3, LoopOrder.JC_IC_JR_IR, "x_zero_point+bias+add"),
        ("kn", deep, LoopOrder.IC_JC_IR_JR, "x_zero_point+bias+add"),
        ("nk", deep, LoopOrder.IC_JC_JR_IR, "bias+add"),
        ("kn", deep + 3, LoopOrder.JC_IC_IR_JR, "bias+add"),
    )
    turn = OF_ACTIVATIONS.index(row) % len(ways)
    found = []
    for layout, k, order, epilogue in ways if row in FIRST_TO_READ else ways[turn : turn + 1]:
        text = f"matmul {row.problem(f'1..{mr + 1}x{2 * nr + 1}x{k}', layout, epilogue)}"
        words = ["", " pack_w"] if can_read_w_in_place(Problem.parse(text), family) else [" pack_w"]
        found += [
            Subject(
                problem=text,
                candidate=candidate_text(row, k, order=order, extras=word, tile=(mr, nr)),
            )
            for word in words
        ]
    return found


@pytest.mark.proof
@pytest.mark.parametrize("row", each_executed(OF_ACTIVATIONS))
def test_each_family_reads_and_packs_what_comes_with_the_call(row: Row) -> None:
    toolchain = grid_toolchain(as_served=row.stands_for_all)

    assert prove_all(subjects_of(row), toolchain) == {}


@pytest.mark.parametrize(
    ("problem", "candidate"),
    [
        ("matmul f32 7x13x18 nk bias", f"{PACKED} grid2x2"),
        ("matmul f32 1..7x13x18 kn bias", f"{PACKED} u2"),
        (
            "matmul s8_u8_s32_f32 5x13x18 kn x_zero_point+bias",
            "scalar_int8_2x4 mc4_nc8_kc16 ic_jc_jr_ir pack_w",
        ),
        ("matmul int8 7x13x18 kn bias fixed", "scalar_int8_2x4 mc8_nc8_kc7 jc_ic_jr_ir"),
    ],
)
def test_the_proof_passes_with_heads_and_strides(problem: str, candidate: str) -> None:
    subject = Subject(problem=problem, candidate=candidate)

    assert prove_all([subject], grid_toolchain(as_served=False)) == {}


def test_a_block_of_w_has_room_for_the_whole_steps_of_all_of_k() -> None:
    family = family_named("avx2_int8")
    need_proof(family.isa)
    subject = Subject(
        problem="matmul int8 3x64x7 kn", candidate="avx2_int8_2x8 mc4_nc64_kc7 jc_ic_jr_ir pack_w"
    )

    assert prove_all([subject], grid_toolchain(as_served=False)) == {}


@pytest.mark.parametrize(
    "fault",
    [
        " + head * args.x_head_stride",
        " + head * args.w_head_stride",
        " + head * args.y_head_stride",
        " + head * stride",
        "item * args.x_batch_stride",
        "item * args.w_batch_stride",
        "pack_w(call, jc, columns, pc, depth);",
    ],
)
def test_the_proof_finds_what_a_kernel_leaves_out(fault: str) -> None:
    def without(source: Source, isa: frozenset[IsaFeature]) -> tuple[Source, frozenset[IsaFeature]]:
        assert fault in source.text
        left = "0" if fault.startswith("item") else ""
        return replace(source, text=source.text.replace(fault, left)), isa

    subject = Subject(problem="matmul f32 7x13x18 nk bias", candidate=PACKED)
    (finding,) = prove_all([subject], grid_toolchain(as_served=False), without).values()

    assert finding.outcome in {Outcome.WRONG, Outcome.OUT_OF_BOUNDS, Outcome.CRASHED}


def test_the_workspace_is_bounded_by_parts_and_blocks() -> None:
    large = kernel_of(
        "matmul f32 64x4096x512 nk", "scalar_f32_2x4 mc64_nc64_kc128 jc_ic_jr_ir pack_w"
    )
    in_place = kernel_of("matmul f32 64x4096x512 kn", "scalar_f32_2x4 mc64_nc64_kc512 jc_ic_jr_ir")

    assert large.native.workspace_bytes(1) == 64 * 128 * 4
    assert large.native.workspace_bytes(7) == 7 * 64 * 128 * 4
    assert in_place.native.workspace_bytes(7) == 0


@pytest.mark.parametrize(("batch", "heads"), [(1, 0), (1, -1), (2**32, 2**32), (2**62, 4)])
def test_products_that_cannot_be_counted_are_refused(batch: int, heads: int) -> None:
    kernel = kernel_of("matmul f32 7x13x18 nk bias", PACKED)
    args = ArgsStruct(size_bytes=sizeof(ArgsStruct), m=7, batch=batch, heads=heads, operand_count=1)

    assert kernel.native.run(args, 0, 0, 1) != OK


def kernels_of_scores() -> list[Kernel | FallbackKernel]:
    problem = Problem.parse(SCORES)
    libraries = [
        FallbackKernel(problem=problem, reason="", instead=Library(text=name))
        for name in ("onednn", "openblas", "numpy")
    ]
    return [kernel_of(SCORES, "scalar_f32_2x4 mc8_nc48_kc16 jc_ic_jr_ir pack_w"), *libraries]


Array = NDArray[Any]  # as what speaks DLPack is returned


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


@pytest.fixture(scope="module")
def scores() -> list[Kernel | FallbackKernel]:
    return kernels_of_scores()


@pytest.fixture(scope="module")
def calls(scores: list[Kernel | FallbackKernel]) -> list[Callable[..., Array]]:
    """Return the ways to compute scores: the call path in C, that in Python, and libraries."""
    kernel = scores[0]
    assert isinstance(kernel, Kernel)
    return [kernel.compute, *scores]


# As projections leave them: (batch, rows, heads, k), seen as (batch, heads, rows, k).
Q = normal(2, 33, 3, 64).transpose(0, 2, 1, 3)
K = normal(2, 48, 3, 64).transpose(0, 2, 1, 3)
MASK = normal(2, 1, 33, 48)
RIGHT = Q @ K.swapaxes(-1, -2) * np.float32(0.125) + MASK


def test_views_of_heads_are_multiplied_without_a_copy(calls: list[Callable[..., Array]]) -> None:
    for kernel in calls:
        out = np.empty((2, 33, 3, 48), np.float32).transpose(0, 2, 1, 3)

        result = kernel(Q, K, out=out, scale=0.125, add=MASK, threads=2, parts=3)

        assert result is out
        np.testing.assert_allclose(out, RIGHT, rtol=1e-4, atol=1e-5)


def test_what_is_missing_in_front_is_the_same_for_all(calls: list[Callable[..., Array]]) -> None:
    one = Q @ K[:, :1].swapaxes(-1, -2) + MASK
    for kernel in calls:
        np.testing.assert_allclose(kernel(Q, K[:, :1], scale=1.0, add=MASK), one, atol=1e-4)
        in_batch = kernel(Q[:, 0], K[0, 0], scale=1.0, add=MASK[:, 0])
        np.testing.assert_allclose(in_batch, Q[:, 0] @ K[0, 0].T + MASK[:, 0], atol=1e-4)
        alone = kernel(Q[0, 0], K[0, 0], scale=1.0, add=MASK[0, 0])
        assert alone.shape == (33, 48)
        np.testing.assert_allclose(alone, Q[0, 0] @ K[0, 0].T + MASK[0, 0], atol=1e-4)
        assert kernel(Q[:0], K[0], scale=1.0, add=MASK[0]).shape == (0, 3, 33, 48)


def test_a_batch_without_products_is_checked_as_any_other(
    calls: list[Callable[..., Array]],
) -> None:
    none, one = Q[:0], K[0]
    for kernel in calls:
        out = np.empty((0, 3, 33, 48), np.float32)
        assert kernel(none, one, scale=1.0, add=MASK[0], out=out) is out
        for x, w, add, message in (
            (none.astype(np.float64), one, MASK[0], "x has the dtype float64"),
            (none[..., :63], one, MASK[0], r"x has the shape \(33, 63\)"),
            (none, one[..., :63], MASK[0], r"w has the shape \(48, 63\)"),
            (none, one, MASK[:0, :, :5], r"add has the shape \(5, 48\)"),
        ):
            with pytest.raises(InvalidArray, match=message):
                kernel(x, w, scale=1.0, add=add)
        with pytest.raises(InvalidArray, match="out has the dtype float64"):
            kernel(none, one, scale=1.0, add=MASK[0], out=out.astype(np.float64))


def test_arrays_that_do_not_fit_are_refused(calls: list[Callable[..., Array]]) -> None:
    for kernel in calls:
        for x, w, message in (
            (Q, K[:, :2], r"x has \(2, 3\) products and w \(2, 2\)"),
            (Q, K.swapaxes(-1, -2), r"w has the shape \(64, 48\)"),
            (Q[..., ::2], K, "x has"),
            (Q.astype(np.float64), K, "x has the dtype float64"),
            (Q.astype("M8[s]"), K, "x has the dtype datetime64"),
            (Q[0, 0, 0], K, "x has the shape"),
            (Q, 3, "w is a int"),
        ):
            with pytest.raises(InvalidArray, match=message):
                kernel(x, w, scale=1.0, add=MASK)
        with pytest.raises(InvalidArray, match="add has the shape"):
            kernel(Q, K, scale=1.0, add=normal(5, 1, 33, 48))
        overlapping = np.lib.stride_tricks.as_strided(
            np.empty((33, 48), np.float32), (2, 3, 33, 48), (0, 0, 192, 4)
        )
        with pytest.raises(InvalidArray, match="products of out overlap each other"):
            kernel(Q, K, scale=1.0, add=MASK, out=overlapping)
        whole = np.broadcast_to(MASK, (2, 3, 33, 48)).copy()
        with pytest.raises(InvalidArray, match="out overlaps add"):
            kernel(Q, K, scale=1.0, add=whole, out=whole)


@needs_native
def test_the_call_path_in_c_takes_such_arrays(
    scores: list[Kernel | FallbackKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = scores[0]
    monkeypatch.setattr(kernel, "compute", None)
    out = np.empty((2, 33, 3, 48), np.float32).transpose(0, 2, 1, 3)

    assert kernel(Q, K, out=out, scale=0.125, add=MASK) is out
    np.testing.assert_allclose(out, RIGHT, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(kernel(Q, K, scale=0.125, add=MASK, threads=2), RIGHT, atol=1e-5)
    one = kernel(Q[0, 0], K[0, 0], scale=0.125, add=MASK[0, 0])
    np.testing.assert_allclose(one, RIGHT[0, 0], atol=1e-5)
    with pytest.raises(TypeError, match="not callable"):  # by the path in Python alone
        kernel(Q, K[:, :2], scale=0.125, add=MASK)


def test_products_of_a_batch_are_for_all_threads(
    scores: list[Kernel | FallbackKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = scores[0]
    assert isinstance(kernel, Kernel)
    asked: list[int] = []
    of_parts = kernel.native.workspace_bytes

    def workspace_bytes(parts: int) -> int:
        asked.append(parts)
        return of_parts(parts)

    monkeypatch.setattr(kernel.native, "workspace_bytes", workspace_bytes)
    monkeypatch.setattr(kernel, "threads", 4)  # in one part, as it was tuned
    for x, w, mask in (
        (Q, K, MASK),
        (Q[0, 0], K[0, 0], MASK[0, 0]),
        (Q[:, 0], K[:, 0], MASK[:, 0]),
    ):
        kernel.compute(x, w, scale=0.125, add=mask)
    kernel.compute(Q, K, scale=0.125, add=MASK, parts=5)

    assert asked == [4, 1, 2, 5]


def test_nothing_is_packed_ahead(scores: list[Kernel | FallbackKernel]) -> None:
    for kernel in scores:
        for use in (kernel.pack, kernel.pack_batch, lambda w, one=kernel: one.batch(Q[0], w)):
            with pytest.raises(InvalidSetting, match=r"call the kernel as kernel\(x, w\)"):
                use(K)


@pytest.mark.parametrize(
    ("problem", "candidate", "message"),
    [
        ("f32 8x32x16 nk", PACKED, "has no pack_w"),
        ("matmul f32 8x32x16 nk", PACKED.removesuffix(" pack_w"), "add pack_w"),
        ("matmul f32 8x32x16 kn", f"{PACKED} pf4096", "has no pf4096"),
        ("matmul f32 8x32x16 nk", f"{PACKED} pf_next", "has no pf_next"),
    ],
)
def test_words_that_do_not_go_with_the_operation_are_refused(
    problem: str, candidate: str, message: str
) -> None:
    with pytest.raises(InvalidCandidate, match=message):
        check_covers(Problem.parse(problem), Candidate.parse(candidate))


def test_every_first_candidate_of_this_cpu_can_be_had() -> None:
    for text in ("f32 32x48x64 nk", "f32 32x48x64 kn", "bf16 1x48x64 nk", "int8 8x48x64 kn"):
        problem = Problem.parse(f"matmul {text}")
        space = Space(problem=problem, cpu=detect_cpu(), threads=4)
        first = space.defaults()

        for candidate in [*first, *space.neighbours(first[0])]:
            check_covers(problem, candidate)


def test_rows_of_a_large_y_are_written_in_order() -> None:
    problem = Problem.parse("matmul f32 2048x2048x64 nk")
    first, *_others = Space(problem=problem, cpu=detect_cpu()).defaults()

    assert first.blocking.pack_w
    assert first.blocking.loop_order.is_ir_outer


@pytest.mark.parametrize(
    ("problem", "candidate"),
    [
        ("matmul f32 3x37x19 kn bias", "avx2_f32_2x16 mc4_nc48_kc8 jc_ic_jr_ir pf4096 u4"),
        ("matmul f32 1x37x24 nk relu", "avx2_f32_dot_1x8 mc1_nc40_kc24 jc_ic_jr_ir pf16384"),
        ("matmul f32 1x9x7 kn", "scalar_f32_1x8 mc1_nc16_kc7 jc_ic_jr_ir pf4096"),
    ],
)
def test_what_is_read_in_place_is_fetched_ahead(problem: str, candidate: str) -> None:
    prove_with(problem, candidate, "__builtin_prefetch")


@pytest.mark.parametrize(
    ("problem", "candidate"),
    [
        ("matmul f32 11x37x29 kn bias", "scalar_f32_2x4 mc4_nc8_kc16 jc_ic_jr_ir pack_w pf_next"),
        ("matmul f32 1..9x37x29 kn", "scalar_f32_2x4 mc4_nc4_kc8 ic_jc_ir_jr pack_w pf_next u2"),
        (
            "matmul f32 9x13x64 kn",
            "scalar_f32_2x4 mc4_nc8_kc16 jc_ic_jr_ir pack_w pf_next grid1x2x2",
        ),
        ("matmul f32 13x90x50 kn", "avx2_f32_4x16 mc8_nc16_kc16 jc_ic_jr_ir pack_w pf_next"),
        ("matmul f32 13x90x50 kn", "avx512_f32_4x48 mc8_nc48_kc16 ic_jc_jr_ir pack_w pf_next"),
        ("matmul bf16 13x90x50 kn", "avx512_bf16_4x48 mc8_nc48_kc50 jc_ic_jr_ir pack_w pf_next"),
    ],
)
def test_the_next_block_of_w_is_fetched_while_one_is_multiplied(
    problem: str, candidate: str
) -> None:
    prove_with(problem, candidate, "call.next_block")


@pytest.mark.parametrize(
    ("problem", "candidate"),
    [
        ("matmul f32 11x37x29 kn bias", "scalar_f32_2x4 mc4_nc8_kc16 jc_ic_jr_ir pf_next"),
        ("matmul f32 1..9x37x29 kn", "scalar_f32_2x4 mc4_nc4_kc8 ic_jc_jr_ir pf_next u2"),
        ("matmul f32 9x13x64 kn", "scalar_f32_2x4 mc4_nc8_kc16 jc_ic_jr_ir pf_next grid1x2x2"),
        ("matmul f32 13x90x50 kn", "avx2_f32_4x16 mc8_nc96_kc16 jc_ic_jr_ir pf_next u4"),
        ("matmul f32 32x100x50 kn", "avx512_f32_8x48 mc32_nc144_kc16 jc_ic_jr_ir pf_next u4"),
        ("matmul bf16 13x90x50 kn", "avx512_bf16_by_f32_4x48 mc8_nc96_kc16 jc_ic_jr_ir pf_next"),
    ],
)
def test_the_next_panel_of_w_in_place_is_fetched_while_one_is_multiplied(
    problem: str, candidate: str
) -> None:
    prove_with(problem, candidate, "next_panel = column + nr < n")


@pytest.mark.parametrize("columns", [16, 20, 32, 76, 92])
@pytest.mark.parametrize("tile", ["amx_int8_32x32", "avx512_int8_4x32", "avx_vnni_int8_4x16"])
def test_columns_that_do_not_fill_a_row_are_packed(tile: str, columns: int) -> None:
    mr, nr = (int(size) for size in tile.rsplit("_", 1)[1].split("x"))
    problem = f"matmul int8 {mr + 1}x{columns}x70 kn"
    nc = -(-columns // nr) * nr
    prove_with(problem, f"{tile} mc{mr}_nc{nc}_kc128 jc_ic_jr_ir pack_w", "(Row)load<floats>")


def prove_with(problem: str, candidate: str, part: str) -> None:
    """Prove a candidate that the space allows, and whose source has a part."""
    parsed, one = Problem.parse(problem), Candidate.parse(candidate)
    family = family_named(one.micro_kernel.family)
    need_proof(family.isa)

    check_covers(parsed, one)
    assert part in render(parsed, one, family).text
    subject = Subject(problem=problem, candidate=candidate)

    assert prove_all([subject], grid_toolchain(as_served=False)) == {}


@pytest.mark.parametrize(
    "problem", ["matmul f32 32x768x768 nk", "f32 32x768x768 kn", "attention f32 32x128x64"]
)
def test_only_rows_along_n_that_are_packed_are_fetched_in_blocks(problem: str) -> None:
    parsed = Problem.parse(problem)
    space = Space(problem=parsed, cpu=core_named("zen4").cpu)

    assert not any(
        one.blocking.pack_w and one.blocking.prefetch_next_panel for one in space.defaults()
    )


def test_a_w_outside_l2_is_packed_for_l1_and_the_next_block_fetched() -> None:
    cpu = core_named("zen4").cpu
    space = Space(problem=Problem.parse("matmul f32 32x768x768 kn"), cpu=cpu)

    first = [one for one in space.defaults() if one.blocking.pack_w and one.micro_kernel.mr > 4]
    tall = [one for one in first if one.micro_kernel.text == "avx512_f32_8x48"]

    assert [one.blocking.text for one in tall] == ["mc32_nc48_kc128 jc_ic_jr_ir pack_w pf_next"]


def test_tiles_of_amx_read_a_large_x_once_beside_few_columns() -> None:
    cpu = core_named("sapphire_rapids").cpu
    for problem in ("bf16 2048x128x2048", "matmul bf16 2048x128x2048 kn", "int8 512x64x4096"):
        parsed = Problem.parse(problem)
        first = [
            one
            for one in Space(problem=parsed, cpu=cpu).defaults()
            if one.micro_kernel.text in {"amx_bf16_16x64", "amx_int8_16x64"}
        ]

        assert first
        assert {one.blocking.kc for one in first} == {parsed.k}
        assert not any(one.blocking.pack_x for one in first)


def test_tiles_of_amx_have_one_depth_where_there_is_one() -> None:
    cpu = core_named("sapphire_rapids").cpu
    space = Space(problem=Problem.parse("matmul bf16 3072x64x128 kn"), cpu=cpu)

    assert {one.blocking.kc for one in space.defaults()} == {128}


def test_one_row_that_reads_in_place_tries_to_fetch_ahead_first() -> None:
    problem = Problem.parse("matmul f32 1x64x4096 kn none")
    space = Space(problem=problem, cpu=core_named("zen4").cpu, threads=1)

    first = [one.blocking for one in space.defaults() if not one.blocking.pack_w]

    assert {blocking.prefetch_w_bytes for blocking in first} == {0, 4096}


def test_dot_products_read_few_rows_in_place() -> None:
    space = Space(problem=Problem.parse("matmul f32 8x512x64 nk"), cpu=detect_cpu())

    in_place = [one for one in space.defaults() if not one.blocking.pack_w]

    assert all("dot" in one.micro_kernel.family for one in in_place)
    assert bool(in_place) == (IsaFeature.AVX2 in detect_cpu().isa)
