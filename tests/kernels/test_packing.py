"""Packed weights, byte by byte, beside the layout that docs/kernels.md draws."""

import json
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from grids import grid_toolchain, toolchain_for_grid_of
from halves import only_packing
from needs import need_cpu
from numpy.typing import NDArray
from other_encoding import needed_here, spelled_for_this_cpu
from rows import ROWS, ROWS_WITH_TAILS, Row, around, candidate_text, lowest_tile, small_tile
from template_parts import render_in_parts
from written import check_parts

from gemm_tuner.abi import KernelLibrary
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.weights import check_weights
from gemm_tuner.build.compile import Build, compile_kernel, compile_kernels
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.blocking import LoopOrder
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import parse_isa
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import CATALOG, family_named

Size = TypeVar("Size")

_NOT_FOR_PACKING = parse_isa(("amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "avx512_fp16"))
PLAIN_ROWS = [row for row in ROWS_WITH_TAILS if not row.types.is_weight_only]
# One row for each way to pack, and each type of integers, whose column sums differ. Floats are
# moved as they are: of two types of one size, the source is the same, and one is proved.
PACKING_ROWS = {
    (
        *(row.family.layout, row.family.lanes, row.family.k_multiple),
        row.types.w if row.types.w.is_integer else row.types.w.size_bytes,
    ): row
    for row in reversed(PLAIN_ROWS)
}.values()
# AMX reads the order of pairs.
GROUPED_ROWS = {
    (
        *(row.family.product.name.replace("tiles", "pairs"), row.family.packs_pairs(row.types)),
        *(row.family.lanes, row.types.w),
    ): row
    for row in reversed(ROWS)
    if row.types.is_weight_only
}.values()
# The quick stage packs for vectors: something of each layout, from either layout in memory.
QUICK_ROWS = {
    (row.family.layout, row.types.w.size_bits): row
    for row in sorted((*PACKING_ROWS, *GROUPED_ROWS), key=lambda row: row.family.lanes)
}.values()
PACKED = [
    pytest.param(
        *(row, layout),
        id=f"{row.name}-{layout}",
        marks=() if row in QUICK_ROWS and layout == ("nk", "kn")[turn % 2] else pytest.mark.proof,
    )
    for turn, row in enumerate((*PACKING_ROWS, *GROUPED_ROWS))
    for layout in ("nk", "kn")
]


@pytest.mark.parametrize(("row", "layout"), PACKED)
def test_packed_bytes_are_those_of_the_layout(row: Row, layout: str) -> None:
    _skip_unless_it_packs(row)
    has_groups = row.types.is_weight_only
    problems = _grouped_problems(row, layout) if has_groups else _plain_problems(row, layout)
    candidates = [
        Candidate.parse(candidate_text(row, one.k, tile=lowest_tile(row.family)))
        for one in problems
    ]
    sources = [
        (only_packing(source), needed)
        for source, needed in (
            spelled_for_this_cpu(render(problem, candidate, row.family), row.family.isa)
            for problem, candidate in zip(problems, candidates, strict=True)
        )
    ]

    builds = compile_kernels(sources, toolchain=find_toolchain())

    for problem, candidate, build in zip(problems, candidates, builds, strict=True):
        assert isinstance(build, Build), build
        stored = _grouped_weights(problem) if has_groups else {"w": _weights(problem)}
        kernel = _load(build)
        packed = kernel.pack(**stored).memory.tobytes()
        expected = (_expected_groups if has_groups else _expected)(problem, candidate, **stored)
        assert packed[: len(expected)] == expected, (problem.text, candidate.text)
        # Groups are followed by room for a prefetch.
        assert has_groups or len(packed) == len(expected), (problem.text, candidate.text)
        for parts in (2, 7, 64):
            check_parts(kernel.native, check_weights(problem, **stored), parts)


@pytest.mark.parametrize(("row", "layout"), PACKED)
def test_packing_does_not_depend_on_what_comes_after_it(row: Row, layout: str) -> None:
    """Tests of loops, options and steps need not transpose w each time, nor have high tiles."""
    texts = {
        _packing(
            row.problem("9x37x50", layout, epilogue),
            candidate_text(row, 50, order=order, extras=extras, tile=tile),
        )
        for order in LoopOrder
        for epilogue, extras, tile in (
            ("row_scale+bias+add", "", small_tile(row.family)),
            ("relu", " u2 grid2x2", lowest_tile(row.family)),
        )
    }

    assert len(texts) == 1


def _packing(problem: str, candidate: str) -> str:
    """Return the text of the parts that pack weights."""
    parts = dict(render_in_parts(problem, candidate))
    of_blocks = ("x_rows", "x_sums", "converted_", "fixed_point")
    return "\n".join(
        text
        for name, text in parts.items()
        if name.startswith("packing/") and not name.removeprefix("packing/").startswith(of_blocks)
    )


@pytest.mark.parametrize("types", ["f32_u4", "bf16_u8", "bf16_s4"])
def test_kernels_of_one_format_pack_as_many_bytes(types: str) -> None:
    problem = Problem.parse(f"{types} 1x100x200 nk:g64")
    isa = detect_cpu().isa | _NOT_FOR_PACKING
    families = [
        one
        for one in CATALOG.values()
        if problem.types in one.types and one.isa <= isa and (1, 32) in one.tiles
    ]
    if len(families) == 1:
        pytest.skip("this CPU has one family for these types")
    sources = [
        (only_packing(render(problem, _one_row(family), family)), family.isa) for family in families
    ]

    builds = compile_kernels(sources, toolchain=grid_toolchain(as_served=False))

    sizes: dict[str, set[int]] = {}
    for build in builds:
        assert isinstance(build, Build), build
        library = KernelLibrary(build.binary)
        sizes.setdefault(json.loads(library.describe())["packed_format"], set()).add(
            library.packed_weight_bytes
        )
    assert len(sizes) < len(families)
    assert all(len(found) == 1 for found in sizes.values()), sizes


def _one_row(family: MicroKernelFamily) -> Candidate:
    return Candidate.parse(f"{family.name}_1x32 mc1_nc128_kc200 jc_ic_jr_ir")


# Without vectors, how packing moves weights depends on the width of a panel.
SCALAR_TILES = tuple(
    (types, f"{family}_1x{nr}")
    for types, family in (
        ("f32", "scalar_f32"),
        ("bf16", "scalar_bf16"),
        ("s8_s8_s32_f32", "scalar_int8"),
        ("u8_u8_s32_f32", "scalar_int8"),
        ("f32_u8", "scalar_w8"),
        ("f32_s4", "scalar_w4"),
    )
    for _mr, nr in family_named(family).tiles
)
# (n, k) of few columns and steps, of more steps, of rows that are far apart, and of more of these
# than are packed at once, all with some left over.
SCALAR_SIZES: tuple[tuple[int, int], ...] = ((7, 13), (37, 300), (1100, 45), (2083, 131))


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(("types", "tile"), SCALAR_TILES)
def test_panels_without_vectors_are_packed_alike(types: str, tile: str, layout: str) -> None:
    family = family_named(tile.rpartition("_")[0])
    has_groups = family.layout is PackedLayout.GROUPS
    mr, nr = map(int, tile.rpartition("_")[2].split("x"))
    rest = ":g32" if has_groups else " x_zero_point" if family.name == "scalar_int8" else ""
    # Every second size: two types, two widths and the layouts share them by turns.
    widths = [width for _mr, width in family.tiles]
    turn = list(dict(SCALAR_TILES)).index(types) + widths.index(nr) + (layout == "kn")
    problems = [
        Problem.parse(f"{types} 1x{n}x{k} {layout}{rest}") for n, k in SCALAR_SIZES[turn % 2 :: 2]
    ]
    candidates = [
        Candidate.parse(f"{tile} mc{mr}_nc{one.n + -one.n % nr}_kc96 jc_ic_jr_ir")
        for one in problems
    ]
    sources = [
        (only_packing(render(problem, candidate, family)), family.isa)
        for problem, candidate in zip(problems, candidates, strict=True)
    ]

    builds = compile_kernels(sources, toolchain=toolchain_for_grid_of(family))

    for problem, candidate, build in zip(problems, candidates, builds, strict=True):
        assert isinstance(build, Build), build
        stored = _grouped_weights(problem) if has_groups else {"w": _weights(problem)}
        expected = (_expected_groups if has_groups else _expected)(problem, candidate, **stored)
        packed = _load(build).pack(**stored).memory.tobytes()
        assert packed == expected, problem.text


def shared(sizes: tuple[Size, ...], w: DType, layout: str) -> tuple[Size, ...]:
    """Return every second size: weights with and without signs share them, in either layout.

    How weights are moved does not depend on signs, but sums of columns and zero points do.
    """
    return sizes[w.is_signed == (layout == "nk") :: 2]


def _plain_problems(row: Row, layout: str) -> list[Problem]:
    _mr, nr = small_tile(row.family)
    columns = (*around(row.family.lanes, nr), 3 * nr + 1)
    sizes = zip(columns, (0, 1, 81, 16, 300, 47, 64, 17, 141), strict=False)
    # Two of three for each layout, so that every one is there for one of them.
    left_out = 0 if layout == "nk" else 1
    return [
        Problem.parse(row.problem(f"1x{n}x{k}", layout, "x_zero_point"))
        for turn, (n, k) in enumerate(sizes)
        if turn % 3 != left_out
    ]


def _grouped_problems(row: Row, layout: str) -> list[Problem]:
    lanes, (_mr, nr) = row.family.lanes, small_tile(row.family)
    cases = (
        (1, 33, "g32"),
        (lanes, 128, "g64"),
        (4 * lanes, 71, "g32"),
        (9 * lanes - 1, 300, "g128"),
        (5 * lanes + 3, 141, "gk"),
        (nr + 1, 1, "gk"),
        (nr, 0, "g32"),
    )
    chosen = shared(cases, row.types.w, layout)
    return [Problem.parse(f"{row.types.text} 1x{n}x{k} {layout}:{g}") for n, k, g in chosen]


def _grouped_weights(problem: Problem) -> dict[str, NDArray[Any]]:
    """Return random weights of every number, two of 4 bits in a byte, its rest not zero."""
    rows, columns = problem.w_shape
    shape = (rows, problem.types.w.row_bytes(columns))
    bits = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    random, groups = np.random.default_rng(4), (problem.n, problem.w_groups)
    stored = {
        "w": bits if problem.types.w.size_bits == 4 else bits.view(NUMPY_TYPES[problem.types.w]),
        "scales": random.random(groups, np.float32),
    }
    if problem.has_zero_points:
        stored["zero_points"] = random.integers(0, 2**problem.types.w.size_bits, groups, np.uint8)
    return stored


def _expected_groups(
    problem: Problem,
    candidate: Candidate,
    w: NDArray[Any],
    scales: NDArray[Any],
    zero_points: NDArray[Any] | None = None,
) -> bytes:
    """Return the packed weights, put together in NumPy from the definition of the layout."""
    family = family_named(candidate.micro_kernel.family)
    bits, lanes = problem.types.w.size_bits, family.lanes
    chunk_k, for_pairs = 32 // bits, family.packs_pairs(problem.types)
    numbers = w.view(np.uint8)
    if bits == 4:
        numbers = np.stack((numbers & 15, numbers >> 4), axis=-1).reshape(len(w), 2 * w.shape[1])
    numbers = numbers[:, : problem.w_shape[1]]
    if problem.has_zero_points:
        numbers = numbers ^ np.uint8(1 << bits - 1)
    columns = numbers if problem.w_layout == "nk" else numbers.T
    columns = np.pad(columns, ((0, -problem.n % lanes), (0, -problem.k % chunk_k)))
    headers = [scales]
    if zero_points is not None:
        headers.append((zero_points.astype(np.float32) - 2 ** (bits - 1)) * scales)
    headers = [np.pad(header, ((0, -problem.n % lanes), (0, 0))) for header in headers]
    packed = []
    nr = candidate.micro_kernel.nr
    for first in range(0, len(columns), nr):
        for group in range(problem.w_groups):
            packed += [header[first : first + nr, group].tobytes() for header in headers]
            begin, end = (i * (problem.w_group or 0) for i in (group, group + 1))
            panel = columns[first : first + nr]
            for p in range(begin, min(end, problem.k), chunk_k):
                for v in range(0, len(panel), lanes):
                    chunk = panel[v : v + lanes, p : p + chunk_k]
                    packed.append(_expected_chunk(chunk, bits, for_pairs=for_pairs).tobytes())
    return b"".join(packed)


def _expected_chunk(chunk: NDArray[Any], bits: int, *, for_pairs: bool) -> NDArray[Any]:
    """Return the bytes of the 32 bits of each column: chunk is (columns, steps)."""
    if bits == 8:
        return chunk if for_pairs else chunk.T
    # Which steps lie in the lower and in the upper halves of the four bytes.
    lower, upper = ([0, 4, 1, 5], [2, 6, 3, 7]) if for_pairs else ([0, 2, 4, 6], [1, 3, 5, 7])
    placed: NDArray[Any] = chunk[:, lower] | chunk[:, upper] << 4
    return placed


def _skip_unless_it_packs(row: Row) -> None:
    need_cpu(needed_here(row.isa) - _NOT_FOR_PACKING)


def _weights(problem: Problem) -> NDArray[Any]:
    shape = (problem.n, problem.k) if problem.w_layout == "nk" else (problem.k, problem.n)
    bits = np.random.default_rng(3).integers(0, 256, (*shape, problem.types.w.size_bytes), np.uint8)
    dense: NDArray[Any] = bits.view(NUMPY_TYPES[problem.types.w])[..., 0]
    apart = np.zeros((shape[0], shape[1] + 3), dense.dtype)
    apart[:, : shape[1]] = dense
    return apart[:, : shape[1]]


def _load(build: Build) -> Kernel:
    cpu = detect_cpu()
    cpu = replace(cpu, isa=cpu.isa | _NOT_FOR_PACKING)
    return load_kernel(build.binary, artifact=build.artifact, cpu=cpu)


def _expected(problem: Problem, candidate: Candidate, w: NDArray[Any]) -> bytes:
    """Return the packed weights, put together in NumPy from the definition of the layout."""
    family = family_named(candidate.micro_kernel.family)
    columns = w.T if problem.w_layout == "nk" else w
    k, n = columns.shape
    step = family.k_step
    if family.layout is PackedLayout.COLUMNS:
        packed = np.pad(columns, ((0, -k % step), (0, 0))).T.tobytes()
        padded_n = n
    else:
        panels = []
        nr = family.panel_width(candidate.micro_kernel.nr)
        kc = candidate.blocking.kc
        padded_n = n // nr * nr + -(-(n % nr) // family.lanes) * family.lanes
        wide = np.pad(columns, ((0, 0), (0, padded_n - n)))
        for pc in range(0, k, kc):
            block = wide[pc : pc + kc]
            block = np.pad(block, ((0, -len(block) % family.k_multiple), (0, 0)))
            for first in range(0, padded_n, nr):
                panel = block[:, first : first + nr]
                groups = panel.reshape(len(panel) // step, step, panel.shape[1])
                panels.append(groups.transpose(0, 2, 1).tobytes())
        packed = b"".join(panels)
    if not problem.types.w.is_integer:
        return packed
    sums = np.zeros(padded_n, np.int32)
    sums[:n] = columns.astype(np.int32).sum(axis=0)
    return packed + bytes(-len(packed) % 64) + sums.tobytes()


# Large enough to be written past the caches, with columns and steps left over.
_LARGE = (
    ("s8_s8_s32_f32 1x1100x4100 kn", "avx512_int8_dot_1x4 mc1_nc1100_kc4100 jc_ic_jr_ir"),
    ("s8_s8_s32_f32 1x1100x4100 nk", "avx512_int8_dot_1x4 mc1_nc1100_kc4100 jc_ic_jr_ir"),
    ("s8_s8_s32_f32 1x1100x4100 kn", "avx512_int8_1x48 mc1_nc1104_kc4100 jc_ic_jr_ir"),
    ("bf16 1x1100x2050 kn", "avx512_bf16_dot_1x4 mc1_nc1100_kc2050 jc_ic_jr_ir"),
    ("f32 1x1100x1025 kn", "avx512_f32_1x48 mc1_nc1104_kc1025 jc_ic_jr_ir"),
)


@pytest.mark.parametrize(("problem_text", "candidate_text"), _LARGE)
def test_large_weights_are_packed_alike(problem_text: str, candidate_text: str) -> None:
    kernel = _kernel(problem_text, candidate_text)
    w = _weights(kernel.problem)

    packed = kernel.pack(w)

    expected = _expected(kernel.problem, Candidate.parse(candidate_text), w)
    assert len(expected) > 4 << 20
    assert packed.memory.tobytes() == expected


# Kernels for other m, types of x and y, tiles, loops and orders of w: the weights are the same.
# fmt: off
_ALIKE = (
    (("f32 4x100x70 nk",             "avx512_f32_4x48 mc4_nc144_kc32 jc_ic_jr_ir"),
     ("f32 1..64x100x70 kn bias",    "avx512_f32_8x48 mc64_nc48_kc32 ic_jc_ir_jr pack_x u2")),
    (("f32 4x100x70 nk",             "avx512_f32_4x48 mc4_nc144_kc32 jc_ic_jr_ir"),
     ("f32 1x100x70 kn",             "avx512_f32_1x96 mc1_nc192_kc32 jc_ic_jr_ir ws2")),
    (("f32 4x100x70 nk",             "avx2_f32_4x16 mc4_nc112_kc32 jc_ic_jr_ir"),
     ("f32 2x100x70 kn",             "avx2_f32_2x32 mc2_nc128_kc32 jc_ic_jr_ir ws2")),
    (("bf16 16x96x33 nk",            "avx512_bf16_4x32 mc16_nc96_kc34 jc_ic_jr_ir"),
     ("bf16_bf16_f32_f32 1x96x33",   "avx512_bf16_1x32 mc1_nc96_kc34 jc_ic_jr_ir pf4096")),
    (("u8_s8_s32_f32 4x50x70 nk x_zero_point", "avx512_int8_4x32 mc4_nc64_kc72 jc_ic_jr_ir"),
     ("s8_s8_s32_s8 9x50x70 kn",               "avx512_int8_8x32 mc16_nc64_kc72 jc_ic_jr_ir")),
    (("f32 1x7x70 nk",               "avx512_f32_dot_1x4 mc1_nc8_kc70 jc_ic_jr_ir"),
     ("f32 3x7x70 kn relu",          "avx512_f32_dot_3x2 mc3_nc8_kc70 jc_ic_jr_ir")),
    (("bf16 9x7x70 nk",              "avx512_bf16_pairs_dot_3x7 mc9_nc7_kc70 jc_ic_jr_ir"),
     ("bf16 1x7x70 kn",              "avx512_bf16_pairs_dot_1x4 mc1_nc8_kc70 jc_ic_jr_ir")),
)
# fmt: on


@pytest.mark.parametrize(("one", "other"), _ALIKE, ids=lambda pair: pair[1].split()[0])
def test_kernels_of_one_format_pack_the_same_bytes(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    first, second = (_kernel(*texts) for texts in (one, other))
    w = _weights(first.problem)

    packed = first.pack(w)
    repacked = second.pack(w if second.problem.w_layout == first.problem.w_layout else w.T.copy())

    assert first.packed_format == second.packed_format
    assert packed.memory.tobytes() == repacked.memory.tobytes()


def test_kernels_of_one_format_share_one_packed_copy() -> None:
    (first, second) = (_kernel(*texts) for texts in _ALIKE[0])
    w = np.random.default_rng(5).random((100, 70), np.float32)
    x = np.random.default_rng(6).random((7, 70), np.float32)

    y = second(x, first.pack(w), bias=np.zeros(100, np.float32))

    np.testing.assert_allclose(y, x @ w.T, rtol=1e-5)


def test_weights_of_another_format_are_refused() -> None:
    kernel = _kernel(*_ALIKE[0][0])
    other = _kernel("f32 4x100x70 nk", "avx512_f32_4x32 mc4_nc128_kc70 jc_ic_jr_ir")
    x, w = np.zeros((4, 70), np.float32), np.zeros((100, 70), np.float32)

    with pytest.raises(InvalidArray) as refusal:
        kernel(x, other.pack(w))

    assert "'f32 100x70 panels nr32 last16'" in str(refusal.value)
    assert "'f32 100x70 panels nr48 last16 kc32'" in str(refusal.value)


def _kernel(problem_text: str, candidate_text: str) -> Kernel:
    candidate = Candidate.parse(candidate_text)
    family = family_named(candidate.micro_kernel.family)
    need_cpu(family.isa)
    source = render(Problem.parse(problem_text), candidate, family)
    build = compile_kernel(source, isa=family.isa, toolchain=grid_toolchain(as_served=False))
    return load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
