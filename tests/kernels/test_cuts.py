"""A call in any number of parts: each element of y is of one part, and no part has much more."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from grids import grid_toolchain
from needs import each_executed
from numpy.typing import NDArray
from proof import Subject, prove_all
from rows import FEW_ROWS as ROWS
from rows import KC, Row, candidate_text, small_tile

from gemm_tuner.abi import OK, ArrayView, make_args
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.micro_kernel import PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.memory import address_of, allocate_aligned
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.scaling.shares import shares_of
from gemm_tuner.space.catalog import family_named

PARTS = (1, 2, 3, 4, 7, 8, 13, 16, 32, 64, 128)

# Kernels that were tuned for one thread. k is short: the cut does not depend on it.
SQUARE = ("f32 512x512x16", "avx2_f32_6x16 mc510_nc512_kc16 jc_ic_jr_ir")
UP = ("f32 128x1024x16", "avx2_f32_6x16 mc132_nc1024_kc16 jc_ic_jr_ir")
FEW_ROWS = ("f32 16x4096x16", "avx2_f32_4x16 mc16_nc4096_kc16 jc_ic_jr_ir")
ONE_ROW = ("f32 1x4096x16", "avx2_f32_1x32 mc1_nc4096_kc16 jc_ic_jr_ir")
RANGE = ("f32 1..300x200x40 nk bias", "avx2_f32_6x16 mc60_nc208_kc20 ic_jc_ir_jr pack_x u2")
# Such a tile reads as many numbers as it multiplies: less to read counts more than an even cut.
SCALAR = ("f32 40x30x10", "scalar_f32_2x2 mc40_nc30_kc10 jc_ic_jr_ir")
ONE_TILE = ("f32 2x2x5", "scalar_f32_2x2 mc2_nc2_kc5 jc_ic_jr_ir")
# Rows that a part copies count as well. In 16 and 32 parts, it is cut in bands of rows.
BANDS = ("f32 260x345x16", "avx2_f32_4x16 mc20_nc352_kc16 ic_jc_jr_ir pack_x")
SLICED = ("f32 1..40x100x2048 nk bias", "avx2_f32_4x16 mc40_nc112_kc512 jc_ic_jr_ir grid1x2x4")


@cache
def kernel_of(problem: str, candidate: str) -> Kernel:
    parsed = Candidate.parse(candidate)
    family = family_named(parsed.micro_kernel.family)
    source = render(Problem.parse(problem), parsed, family)
    build = compile_kernel(source, isa=family.isa, toolchain=grid_toolchain(as_served=False))
    return load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())


def normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def runner(kernel: Kernel, m: int) -> Callable[[int, int], NDArray[np.float32]]:
    """Return a function that runs one part of the first phase, and returns y: NaN, or computed."""
    problem = kernel.problem
    x, bias = normal(m, problem.k), normal(problem.n)
    packed = kernel.pack(normal(problem.n, problem.k))

    def run(part: int, parts: int) -> NDArray[np.float32]:
        y = np.full((m, problem.n), np.nan, np.float32)
        workspace = allocate_aligned(kernel.native.workspace_bytes(parts))
        args = make_args(
            m=m,
            x=ArrayView(address_of(x), problem.k),
            packed_w=address_of(packed.memory),
            y=ArrayView(address_of(y), problem.n),
            operands=[ArrayView(address_of(bias), 0) for _one in problem.epilogue.operands],
            workspace=address_of(workspace),
        )
        assert kernel.native.run(args, 0, part, parts) == OK
        return y

    return run


@pytest.mark.parametrize(
    ("problem", "candidate", "m"),
    [
        (*SQUARE, 512),
        (*UP, 128),
        (*FEW_ROWS, 16),
        (*ONE_ROW, 1),
        (*RANGE, 1),
        (*RANGE, 7),
        (*RANGE, 299),
        (*BANDS, 260),
        (*SCALAR, 40),
        (*ONE_TILE, 2),
    ],
)
def test_each_element_is_computed_by_one_part(problem: str, candidate: str, m: int) -> None:
    kernel = kernel_of(problem, candidate)
    run = runner(kernel, m)
    whole = run(0, 1)
    largest = []
    for parts in PARTS:
        written = np.zeros(whole.shape, np.int64)
        sizes = []
        shares = shares_of(kernel.problem, kernel.candidate, m=m, parts=parts)
        for part in range(parts):
            y = run(part, parts)
            is_computed = ~np.isnan(y)
            assert np.array_equal(y[is_computed], whole[is_computed])
            is_told = np.zeros_like(is_computed)
            for piece in shares.parts[part].pieces:
                rows = slice(piece.row_begin, piece.row_end)
                is_told[rows, piece.column_begin : piece.column_end] = True
            assert np.array_equal(is_computed, is_told)
            written += is_computed
            sizes.append(int(is_computed.sum()))
        assert (written == 1).all(), f"{parts} parts"
        largest.append(max(sizes))

    for fewer, more in pairwise(largest):
        assert more <= fewer, "more parts take longer"
    tile, n = kernel.candidate.micro_kernel, kernel.problem.n
    tiles = -(-m // tile.mr) * -(-n // tile.nr)
    counts_more = problem == SCALAR[0] or kernel.candidate.blocking.pack_x
    for parts, most in zip(PARTS, largest, strict=True):
        if tiles >= 4 * parts and not counts_more:
            even = m * n / parts / (0.95 if parts <= 16 else 0.85)
            as_tiles_allow = -(-tiles // parts) * tile.mr * tile.nr
            assert most <= max(even, as_tiles_allow), f"{parts} parts"


@pytest.mark.parametrize(
    ("m", "batch"), [(1, 1), (40, 1), (13, 2), (3, 3), (40, 7), (1, 16), (2, 17), (1, 0)]
)
@pytest.mark.parametrize("chosen", [RANGE, SLICED], ids=["one phase", "slices of k"])
def test_products_of_a_batch_are_right_in_any_parts(
    chosen: tuple[str, str], m: int, batch: int
) -> None:
    kernel = kernel_of(*chosen)
    problem = kernel.problem
    x, w, bias = normal(batch, m, problem.k), normal(problem.n, problem.k), normal(problem.n)
    packed = kernel.pack(w)
    expected = x.astype(np.float64) @ w.T + bias

    seen = set()
    for parts in PARTS:
        y = np.full((batch, m, kernel.problem.n), np.nan, np.float32)
        kernel.batch(x, packed, out=y, threads=parts, bias=bias)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)
        seen.add(y.tobytes())
    # Slices of k are added in another order, and in one other.
    assert len(seen) == 1 or (chosen is SLICED and batch == 1 and len(seen) == 2)


@pytest.mark.parametrize(
    ("m", "parts", "is_sliced"),
    [
        (40, 8, True),  # as tuned
        (40, 2, False),  # fewer than slices
        (40, 7, False),  # a panel for each part
        (1, 7, False),  # the same of one row
        (1, 28, True),  # a slice of a panel for each part
        (1, 31, True),
    ],
)
def test_k_is_sliced_where_that_takes_less(m: int, parts: int, *, is_sliced: bool) -> None:
    kernel = kernel_of(*SLICED)
    run = runner(kernel, m)
    shares = shares_of(kernel.problem, kernel.candidate, m=m, parts=parts)

    # Sums of slices are not in y before the second phase.
    assert all(np.isnan(run(part, parts)).all() for part in range(parts)) == is_sliced
    assert (shares.slices > 1) == is_sliced
    assert sum(part.products for part in shares.parts) == m * kernel.problem.n * kernel.problem.k


@pytest.mark.proof
@pytest.mark.parametrize("row", each_executed(ROWS))
def test_every_family_has_enough_tiles_for_many_parts(row: Row) -> None:
    """The proof cuts calls, and packing, in up to 64 parts; other tests have few tiles."""
    mr, nr = small_tile(row.family)
    kc = max(KC, row.family.k_multiple)
    cases = [
        (f"{9 * mr + 1}x{8 * nr + 3}x{kc + 3}", "nk", ""),
        (f"1..{5 * mr}x{13 * nr}x{kc}", "kn", ""),
    ]
    if row.family.layout is PackedLayout.PANELS:
        cases.append((f"{3 * mr}x{9 * nr - 1}x{4 * kc}", "kn", " grid1x2x2"))
    if not row.is_plain:  # cuts depend on sizes alone
        turn = ROWS.index(row) % len(cases)
        cases = cases[turn : turn + 1]
    subjects = [
        Subject(
            problem=row.problem(sizes, layout, "x_zero_point+row_scale+bias+add"),
            candidate=candidate_text(row, int(sizes.rpartition("x")[2]), extras=extras),
        )
        for sizes, layout, extras in cases
    ]

    wrong = prove_all(subjects, grid_toolchain(as_served=row.stands_for_all))

    assert not wrong
