"""Attention: two products of a micro-kernel, and the weights of a softmax between them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from math import lcm
from typing import Any

import numpy as np
import pytest
from grids import grid_toolchain
from needs import each_executed, need_proof
from numpy.typing import NDArray
from proof import Subject, prove_all
from rows import ROWS, Row
from test_cuts import kernel_of

from gemm_tuner.abi import OK, ArgsStruct, ArrayView, make_args
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.measurement import Library
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import InvalidArray, InvalidCandidate, InvalidSetting
from gemm_tuner.libraries import attention_layer
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.space.cores import core_named
from gemm_tuner.space.limits import check_covers

KERNEL = "scalar_f32_2x4 mc4_nc8_kc5 ic_jc_ir_jr pack_w"
PRODUCT = "scalar_f32_2x4 mc4_nc8_kc5 ic_jc_ir_jr pack_w"
FULL = "attention f32 1..7x21x5 scale+add+causal"
OF_SCORES = [
    row
    for row in ROWS
    if row.family.template.name in {"outer_product", "amx"}
    and row.types
    in {OperandTypes.of(one, y=DType.F32) for one in (DType.F32, DType.BF16, DType.F16)}
    and not row.family.partial_steps
]


def subjects_of(row: Row) -> list[Subject]:
    """Return attention by a family: tails, packed and in place, one block and many."""
    family = row.family
    mr, nr = family.tiles[1]
    keys = lcm(nr, family.k_multiple)  # of the smallest block
    in_place = "" if family.k_step == 1 else " pack_w"  # several steps of k lie side by side
    cases = [
        (f"1..{2 * mr + 1}", 2 * nr + 3, nr + 3, keys, "scale+add+causal", " pack_w"),
        (f"{mr + 1}", 2 * nr + 1, 2 * nr, 3 * keys, "scale", in_place),
        (f"{2 * mr}", nr - 1, 3, keys, "causal", in_place),
        (f"1..{mr + 1}", f"1..{2 * nr + 3}", 3, keys, "scale+causal", in_place),
        (f"1..{2 * mr}", f"1..{5 * nr + 3}", nr + 1, 2 * keys, "scale+add", " pack_w grid2x3"),
    ]
    if family.dot is not None and not family.k_tile:
        k = 2 * family.dot.k_step
        cases.append(
            (
                f"1..{mr + 1}",
                f"1..{3 * nr + 3}",
                k,
                nr,
                "scale+causal",
                f"{in_place} dot_keys grid1x2",
            )
        )
    return [
        Subject(
            problem=f"attention {row.types.x.value} {m}x{n}x{k} {steps}",
            candidate=f"{family.name}_{mr}x{nr} mc{mr}_nc{nc}_kc{k} ic_jc_jr_ir{words}",
        )
        for m, n, k, nc, steps, words in cases
    ]


WORDS_OF_FEW_QUERIES = ("dot_keys", "dot_keys pf4096", "pack_w dot_keys pf8192")


def test_tiles_of_few_queries_read_keys_in_place() -> None:
    family = family_named("avx2_f32")
    need_proof(family.isa)
    tiles = [(mr, nr) for mr, nr in family.tiles if mr <= 4 and nr <= 16]
    subjects = [
        Subject(
            problem=f"attention f32 {mr}x1..{2 * nr + 3}x16 scale",
            candidate=f"avx2_f32_{mr}x{nr} mc{mr}_nc{nr}_kc16 ic_jc_jr_ir {words}",
        )
        for (mr, nr), words in zip(tiles, cycle(WORDS_OF_FEW_QUERIES), strict=False)
    ]

    assert prove_all(subjects, grid_toolchain(as_served=False)) == {}


def test_every_tile_of_single_floats_computes_attention() -> None:
    tiles = family_named("scalar_f32").tiles
    subjects = [
        Subject(
            problem="attention f32 3x10x5 causal",
            candidate=f"scalar_f32_{mr}x{nr} mc{2 * mr}_nc{nr}_kc5 ic_jc_jr_ir{word}",
        )
        for mr, nr in tiles
        for word in ("", " pack_w")
    ]

    assert prove_all(subjects, grid_toolchain(as_served=False)) == {}


@pytest.mark.parametrize("row", each_executed(OF_SCORES, quick=["scalar_f32"]))
def test_every_family_computes_attention(row: Row) -> None:
    toolchain = grid_toolchain(as_served=row.is_plain)

    assert prove_all(subjects_of(row), toolchain) == {}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("visible < count ? visible : count", "visible < count ? visible + 1 : count"),
        ("store<lanes>(sums + i, load<lanes>(sums + i) * factor)", "(void)factor"),
        ("state.totals[local] * factor + total", "state.totals[local] + total"),
        ("whole + key < count ? keys", "whole + key <= count ? keys"),
        ("total == 0.0f ? Vector{}", "total < 0.0f ? Vector{}"),
        ("+ head * args.v_head_stride", ""),
        ("+ item * args.v_batch_stride", ""),
        (
            "constexpr uint64_t maxima_bytes = whole_lines(",
            "constexpr uint64_t maxima_bytes = (0 * ",
        ),
        ("select_below(distance, -87.0f, Vector{}, ", "("),
    ],
    ids=[
        "one key too many is seen",
        "sums do not shrink",
        "totals do not shrink",
        "a key past the last is read",
        "a row that sees nothing is not zero",
        "one v for all heads",
        "one v for all of the batch",
        "maxima have no room",
        "a hidden key has a weight",
    ],
)
def test_the_proof_finds_a_planted_fault(right: str, wrong: str) -> None:
    def spoil(source: Source, isa: frozenset[IsaFeature]) -> tuple[Source, frozenset[IsaFeature]]:
        assert right in source.text
        return replace(source, text=source.text.replace(right, wrong)), isa

    (finding,) = prove_all(
        [Subject(problem=FULL, candidate=KERNEL)], grid_toolchain(as_served=False), spoil
    ).values()

    assert finding.outcome in {Outcome.WRONG, Outcome.OUT_OF_BOUNDS, Outcome.CRASHED}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("slice.totals[place] != 0.0f", "true"),
        ("factor * slice.totals[place]", "slice.totals[place]"),
        ("slice.maxima[place] > greatest ?", "false ?"),
        ("blocks, part, unit > first", "blocks, part, false"),
        ("line.begin(other) < unit_end", "other <= part"),
        ("state_bytes + 2 * slice_bytes", "state_bytes + slice_bytes"),
    ],
    ids=[
        "a slice that saw nothing has sums",
        "totals of slices are not weighed",
        "slices have no greatest score",
        "the end of one unit and the beginning of the next share their place",
        "other parts are left out",
        "the second slice has no room",
    ],
)
def test_the_proof_finds_a_fault_in_slices(right: str, wrong: str) -> None:
    def spoil(source: Source, isa: frozenset[IsaFeature]) -> tuple[Source, frozenset[IsaFeature]]:
        assert right in source.text
        return replace(source, text=source.text.replace(right, wrong)), isa

    (finding,) = prove_all(
        [Subject(problem=FULL, candidate=f"{KERNEL} grid1x3")],
        grid_toolchain(as_served=False),
        spoil,
    ).values()

    assert finding.outcome in {Outcome.WRONG, Outcome.OUT_OF_BOUNDS, Outcome.CRASHED}


def test_keys_beside_few_queries_are_read_in_place_first() -> None:
    def words(text: str) -> set[bool]:
        space = Space(problem=Problem.parse(text), cpu=core_named("zen4").cpu)
        return {one.blocking.dot_keys for one in space.defaults()}

    assert True in words("attention f32 1..8x1..4096x64 scale")
    assert words("attention f32 9x4096x64 scale") == {False}
    assert words("attention f32 1x4096x60 scale") == {False}  # no whole vectors
    assert words("matmul f32 1x4096x64 nk none") == {False}


def test_few_queries_are_cut_along_their_keys() -> None:
    def grids(text: str, threads: int) -> set[tuple[int, int, int]]:
        space = Space(problem=Problem.parse(text), cpu=core_named("zen4").cpu, threads=threads)
        tried = [one.blocking for one in space.defaults()]
        return {(one.grid_m, one.grid_n, one.grid_k) for one in tried}

    assert (1, 8, 1) in grids("attention f32 1x4096x64 scale", 8)
    assert all(grid[1] == 1 for grid in grids("attention f32 512x4096x64 scale", 8))
    assert grids("attention f32 1x100x64 scale", 8) == {(1, 1, 1)}  # slices would be short


@pytest.mark.parametrize(
    ("candidate", "what"),
    [
        ("avx2_f32_dot_1x4 mc1_nc4_kc5 ic_jc_jr_ir pack_w", "choose one of outer products"),
        ("avx2_f32_4x16 mc4_nc16_kc5 jc_ic_jr_ir pack_w", "choose ic_jc_jr_ir"),
        ("avx2_f32_4x16 mc4_nc16_kc4 ic_jc_jr_ir pack_w", "choose 5"),
        ("avx2_f32_4x16 mc4_nc16_kc5 ic_jc_jr_ir pack_x pack_w", "pack_x"),
        ("avx2_f32_4x16 mc4_nc16_kc5 ic_jc_jr_ir pack_w pf4096", "has no pf4096"),
        ("avx2_f32_4x16 mc4_nc16_kc5 ic_jc_jr_ir pack_w grid1x1x2", "2 slices"),
        ("avx2_f32_4x16 mc4_nc16_kc5 ic_jc_jr_ir dot_keys", "keys to read in dot products"),
        ("scalar_f32_2x4 mc4_nc16_kc5 ic_jc_jr_ir dot_keys", "keys to read in dot products"),
    ],
)
def test_what_a_kernel_of_attention_does_not_have_is_refused(candidate: str, what: str) -> None:
    with pytest.raises(InvalidCandidate, match=what):
        check_covers(Problem.parse(FULL), Candidate.parse(candidate))


@pytest.mark.parametrize("sizes", ["100x300x20", "1x1..4096x64"])
def test_what_is_searched_can_be_typed(sizes: str) -> None:
    problem = Problem.parse(f"attention f32 {sizes} scale+causal")
    space = Space(problem=problem, cpu=core_named("zen4").cpu, threads=2)
    dice = np.random.default_rng(1)

    drawn = [space.draw(dice) for _ in range(100)]

    assert len(set(drawn)) > 50
    for candidate in (*space.defaults(), *drawn):
        assert candidate is not None
        check_covers(problem, candidate)


def softmax_of(scores: NDArray[Any]) -> NDArray[Any]:
    """Return weights, of a row that sees nothing zeros."""
    greatest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(greatest), 0.0, greatest))
    sums = weights.sum(axis=-1, keepdims=True)
    divided: NDArray[Any] = weights / np.where(sums == 0.0, 1.0, sums)
    return divided


def arrays_of_heads() -> dict[str, NDArray[Any]]:
    """Return views of (batch, rows, heads, size): 2 heads of keys for 4 of queries, and a mask."""
    random = np.random.default_rng(5)

    def heads(rows: int, count: int) -> NDArray[Any]:
        return random.standard_normal((3, rows, count, 5), np.float32).swapaxes(1, 2)

    add = random.standard_normal((3, 1, 6, 21), np.float32)
    add[1, :, 2] = -np.inf
    k, v = (np.repeat(heads(21, 2), 2, axis=1) for _each in range(2))
    return {"q": heads(6, 4), "k": k[:, :1], "v": v, "add": add}


def right_of(q: Any, k: Any, v: Any, add: Any, scale: float) -> NDArray[Any]:  # noqa: ANN401
    """Return attention in float64."""
    q, k, v = (one.astype(np.float64) for one in (q, k, v))
    m, n = add.shape[-2:]
    scores = q @ k.swapaxes(-1, -2) * scale + add
    scores = np.where(np.tri(m, n, n - m, dtype=bool), scores, -np.inf)
    result: NDArray[Any] = softmax_of(scores) @ v
    return result


def by_library(name: str) -> FallbackKernel:
    return FallbackKernel(
        problem=Problem.parse(FULL), reason="", threads=1, instead=Library(text=name)
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: kernel_of(FULL, KERNEL),
        lambda: kernel_of(FULL, f"{KERNEL} grid1x3"),
        lambda: by_library("onednn"),
        lambda: by_library("openblas"),
    ],
    ids=["kernel", "slices", "oneDNN", "OpenBLAS"],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_views_of_batch_and_heads_are_attended_to(
    make: Callable[[], Kernel | FallbackKernel], threads: int
) -> None:
    arrays = arrays_of_heads()
    q, k, v, add = (arrays[name] for name in ("q", "k", "v", "add"))
    kernel, out = make(), np.zeros((3, 6, 4, 5), np.float32)

    y = kernel(q, k, v, scale=0.4, add=add, out=out.swapaxes(1, 2), threads=threads)

    assert np.shares_memory(y, out)
    right = right_of(q, k, v, add, 0.4)
    assert not right[1, :, 2].any()
    np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("library", ["", "onednn", "openblas"])
def test_the_call_says_how_many_keys_there_are(library: str) -> None:
    problem = Problem.parse("attention f32 1..7x0..40x5 scale+add+causal")
    kernel: Kernel | FallbackKernel = (
        FallbackKernel(problem=problem, reason="", threads=1, instead=Library(text=library))
        if library
        else kernel_of(problem.text, KERNEL)
    )
    random = np.random.default_rng(6)
    q = random.standard_normal((2, 4, 5), np.float32)
    for keys in (0, 1, 3, 8, 9, 39, 40):  # with fewer keys than rows, some see none
        k, v = random.standard_normal((2, 2, keys, 5), np.float32)
        add = random.standard_normal((4, keys), np.float32)

        y = kernel(q, k, v, scale=0.4, add=add)

        right = right_of(q, k, v, add, 0.4) if keys else np.zeros_like(q)
        np.testing.assert_allclose(y, right, rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidArray, match=r"k has 41 keys, .* made for n = 0\.\.40"):
        kernel(q, *np.zeros((2, 2, 41, 5), np.float32), scale=0.4, add=np.zeros((4, 41)))


def test_numpy_makes_weights_where_the_pass_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_layer, "built_finish", lambda: None)
    arrays = arrays_of_heads()
    q, k, v, add = (arrays[name][0] for name in ("q", "k", "v", "add"))

    y = by_library("openblas")(q, k, v, scale=0.4, add=add)

    np.testing.assert_allclose(y, right_of(q, k, v, add, 0.4), rtol=1e-5, atol=1e-6)


def test_wrong_calls_are_told_what_to_pass() -> None:
    kernel, product = kernel_of(FULL, KERNEL), kernel_of("matmul f32 4x8x5 nk none", PRODUCT)
    q, k, v = (np.zeros((rows, 5), np.float32) for rows in (4, 21, 21))
    operands: dict[str, Any] = {"scale": 1.0, "add": np.zeros((4, 21), np.float32)}

    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: kernel(q, k, **operands), "v is missing"),
        (lambda: kernel(q[:, :4], k, v, **operands), "q has the shape (4, 4)"),
        (lambda: kernel(q, k[:20], v, **operands), "k has the shape (20, 5)"),
        (
            lambda: kernel(np.stack([q, q]), np.stack([k] * 3), v, **operands),
            "q has (2,) products and k (3,)",
        ),
        (lambda: product(q[:, :4], k[:8]), "x has the shape (4, 4)"),
        (lambda: kernel(q, k, v[:20], **operands), "(21, 5)"),
        (lambda: kernel(q, k, np.stack([v, v]), **operands), "values for"),
        (lambda: kernel(q, k, v, out=v[:4], **operands), "overlap"),
        (lambda: kernel(q, k, v, **operands | {"scale": 10**400}), "no number of the type f32"),
        (lambda: product(q, k[:8], v), "has no values"),
    ]
    for call, what in wrong:
        with pytest.raises(InvalidArray) as raised:
            call()
        assert what in str(raised.value)
    with pytest.raises(InvalidSetting, match="nothing is packed ahead"):
        kernel.pack(k)


def test_callers_that_know_no_values_call_products_alone() -> None:
    attention, product = kernel_of(FULL, KERNEL), kernel_of("matmul f32 4x8x5 nk none", PRODUCT)
    nowhere = ArrayView(0, 5)
    args = make_args(
        m=4,
        batch=0,
        x=nowhere,
        w=nowhere,
        v=nowhere,
        n=21,
        y=nowhere,
        operands=[nowhere, nowhere],
        workspace=0,
    )

    assert attention.native.run(args, 0, 0, 1) == OK
    for keys in (20, 22):
        args.n = keys
        assert attention.native.run(args, 0, 0, 1) != OK
    args.n = 21
    args.size_bytes = ArgsStruct.v.offset  # as callers of version 4 give it
    assert attention.native.run(args, 0, 0, 1) != OK
    args.operand_count = 0
    assert product.native.run(args, 0, 0, 1) == OK
    args.size_bytes -= 8
    assert product.native.run(args, 0, 0, 1) != OK
