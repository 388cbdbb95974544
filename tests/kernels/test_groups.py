"""Quantised weights: sizes of groups, tails of k in them, and numbers worked out by hand."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, cycle

import numpy as np
import pytest
from grids import grid_toolchain, toolchain_for_grid_of
from needs import each, need_cpu, need_proof
from pairs import all_pairs
from proof import Subject, prove_all

from gemm_tuner import quantise_weights
from gemm_tuner.abi import WeightsStruct, make_weights
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.bench.reproduce import KernelCall
from gemm_tuner.build.compile import Build, compile_kernel
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.micro_kernel import Can, MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray, KernelRejected
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import CATALOG, family_named

FAMILIES = [family for family in CATALOG.values() if family.layout is PackedLayout.GROUPS]
# Tiles of AMX and in fixed point are converted one at a time, for all of k.
IN_BLOCKS = [family for family in FAMILIES if family.template.name == "grouped"]
SIDE_BY_SIDE = [
    family
    for family in FAMILIES
    if Can.READ_PANELS_SIDE_BY_SIDE in family.can and not family.vectors.are_scalars
]


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return grid_toolchain(as_served=False)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> MicroKernelFamily:
    wanted: MicroKernelFamily = request.param
    need_proof(wanted.isa)
    return wanted


def _candidate(family: MicroKernelFamily, k: int, extras: str = "") -> str:
    mr = max(2, family.register_rows)
    nr = 2 * family.lanes if family.lanes > 1 else 4
    if family.is_in_fixed_point:
        extras = extras.replace(" pack_x", "")
    return f"{family.name}_{mr}x{nr} mc{2 * mr}_nc{2 * nr}_kc{max(1, k)} jc_ic_jr_ir{extras}"


def _sizes(family: MicroKernelFamily, most: int) -> Iterator[str]:
    """Yield m and n: tiles of all heights, or those with a rest of columns, which read k alike.

    Which cases have which does not follow a power of two.
    """
    sizes = (f"0..{most}x{4 * max(2, family.lanes)}", f"4x{3 * family.lanes + 1}")
    return (sizes[turn.bit_count() % 2] for turn in count())


@pytest.mark.proof
def test_groups_of_every_size_with_every_tail(family: MicroKernelFamily) -> None:
    texts = sorted(types.text for types in family.types)
    cases = (
        *(("g32", k) for k in (0, 1, 31, 32, 33, 71, 100)),
        *(("g64", k) for k in (65, 127)),
        *(("g128", k) for k in (131, 384)),
        *(("gk", k) for k in (7, 133)),
    )
    ways = all_pairs(texts, ("", " pack_x u2", " pf4096 u4 grid1x2"), ("nk", "kn"))
    subjects = [
        Subject(
            problem=f"{types} {sizes}x{k} {layout}:{groups} bias",
            candidate=_candidate(family, k, extra),
        )
        for (groups, k), (types, extra, layout), sizes in zip(
            cases, cycle(ways), _sizes(family, 5), strict=False
        )
    ]

    wrong = prove_all(subjects, toolchain_for_grid_of(family))

    assert not wrong


@pytest.mark.parametrize("family", each(SIDE_BY_SIDE))
def test_vectors_of_a_tile_are_panels_side_by_side(family: MicroKernelFamily) -> None:
    """Of one to four rows, where the last tile has fewer vectors, or part of one."""
    texts = sorted(types.text for types in family.types)
    cases = (
        *((rows, "g32", k) for rows, k in ((1, 31), (3, 100), (4, 160))),
        *((rows, "gk", k) for rows, k in ((2, 7), (1, 133))),
    )
    ways = all_pairs(texts, (" ws4 u2", " pf1024 ws2", " ws3 grid1x2"), ("nk", "kn"))
    subjects = []
    for (types, extra, layout), (rows, groups, k) in zip(ways, cycle(cases), strict=False):
        width = int(extra.partition("ws")[2][0]) * family.lanes
        n = 2 * width + family.lanes + k % 3
        step = k + -k % family.k_step
        subjects.append(
            Subject(
                problem=f"{types} {rows}x{n}x{k} {layout}:{groups} bias",
                candidate=f"{family.name}_{rows}x{width} "
                f"mc{rows}_nc{2 * width}_kc{step} jc_ic_jr_ir{extra}",
            )
        )

    wrong = prove_all(subjects, toolchain_for_grid_of(family))

    assert not wrong


@pytest.mark.proof
@pytest.mark.parametrize("family", each(IN_BLOCKS))
def test_blocks_of_groups_and_weights_converted_once(family: MicroKernelFamily) -> None:
    texts = sorted(types.text for types in family.types)
    in_blocks = (
        *(("g32", k, 32) for k in (33, 64, 71, 100)),
        *(("g32", k, 64) for k in (65, 127, 131, 160)),
    )
    whole = (
        *(("g64", k, k) for k in (0, 127)),
        *(("gk", k, k) for k in (1, 133)),
    )
    once = (" convert_once", " pack_x convert_once pf_next u2", " convert_once pf4096 grid1x2")
    # Those that convert nothing once are proved above, but for several blocks of k.
    chosen = (
        *zip((*in_blocks, *whole), cycle(all_pairs(texts, once, ("nk", "kn"))), strict=False),
        *zip(in_blocks[::2], cycle(all_pairs(texts, ("",), ("nk", "kn"))), strict=False),
    )
    # Without vectors, weights of 8 bits and of 4 share them.
    if family.lanes == 1:
        chosen = chosen[IN_BLOCKS.index(family) % 2 :: 2]
    subjects = [
        Subject(
            problem=f"{types} {sizes}x{k} {layout}:{groups} bias",
            candidate=_candidate(family, kc, extra),
        )
        for ((groups, k, kc), (types, extra, layout)), sizes in zip(
            chosen, _sizes(family, 9), strict=False
        )
    ]

    wrong = prove_all(subjects, toolchain_for_grid_of(family))

    assert not wrong


@pytest.mark.parametrize("w_type", ["s8", "u8", "s4", "u4"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_a_kernel_computes_what_its_weights_stand_for(
    w_type: str, layout: str, toolchain: Toolchain
) -> None:
    family = family_named(f"scalar_w{w_type[1]}")
    kernel = _load(f"f32_{w_type} 3x5x70 {layout}:g32 none", family, toolchain)
    random = np.random.default_rng(7)
    w = random.standard_normal((5, 70) if layout == "nk" else (70, 5), np.float32)
    x = random.standard_normal((3, 70), np.float32)
    quantised = quantise_weights(w, w_type, group=32, w_layout=layout)

    packed = kernel.pack(quantised.w, scales=quantised.scales, zero_points=quantised.zero_points)
    y = np.asarray(kernel(x, packed))

    # The quantised weights are within half a step of w, and no step is larger than this.
    columns = w if layout == "nk" else w.T
    step = 2 * np.abs(w).max() / (2 ** int(w_type[1]) - 2)
    assert np.all(np.abs(y - x @ columns.T) <= np.abs(x).sum(axis=1, keepdims=True) * 0.51 * step)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(
    "family", each([one for one in FAMILIES if any(not t.w.is_signed for t in one.types)])
)
def test_zero_points_between_the_elements(
    family: MicroKernelFamily, layout: str, toolchain: Toolchain
) -> None:
    need_cpu(family.isa)
    types = next(one for one in family.types if not one.w.is_signed)
    problem = f"{types.text} 3x{2 * family.lanes + 3}x70 {layout}:g32 none"
    kernel = _load(problem, family, toolchain)
    shape = kernel.problem.n, kernel.problem.k
    random = np.random.default_rng(11)
    w = random.standard_normal(shape if layout == "nk" else shape[::-1], np.float32)
    q = quantise_weights(w, types.w.value, group=32, w_layout=layout)
    assert q.zero_points is not None
    between = q.zero_points + random.uniform(-0.5, 0.5, q.zero_points.shape).astype(np.float32)

    as_bytes = kernel.pack(q.w, scales=q.scales, zero_points=q.zero_points)
    as_floats = kernel.pack(q.w, scales=q.scales, zero_points=q.zero_points.astype(np.float32))
    moved = KernelCall(
        kernel=kernel,
        x=_x_of(kernel, random),
        w=q.w,
        scales=q.scales,
        zero_points=between,
    )

    assert kernel.takes_float_zero_points
    assert np.array_equal(as_bytes.memory, as_floats.memory)
    assert moved.error is None
    assert replace(moved, zero_points=q.zero_points).expected.values.tolist() != (
        moved.expected.values.tolist()
    )


@pytest.mark.parametrize("dtype", ["float64", "float16", ">f4", "int32", "bool"])
def test_zero_points_of_other_types_are_refused(dtype: str, toolchain: Toolchain) -> None:
    kernel = _load("f32_u4 1x2x32 nk:g32 none", family_named("scalar_w4"), toolchain)
    w, scales = np.zeros((2, 16), np.uint8), np.ones((2, 1), np.float32)
    wanted = "float32" if np.dtype(dtype).kind == "f" else "uint8"

    with pytest.raises(InvalidArray, match=f"zero_points.*{wanted}"):
        kernel.pack(w, scales=scales, zero_points=np.zeros((2, 1), dtype))


def test_a_kernel_refuses_zero_points_of_another_kind(toolchain: Toolchain) -> None:
    signed = _load("f32_s4 1x2x32 nk:g32 none", family_named("scalar_w4"), toolchain)
    unsigned = _load("f32_u4 1x2x32 nk:g32 none", family_named("scalar_w4"), toolchain)
    w, scales = np.zeros((2, 16), np.uint8), np.ones((2, 1), np.float32)
    zero_points = np.zeros((2, 1), np.float32)
    bytes_too = np.zeros((2, 1), np.uint8)
    memory = np.zeros(signed.native.packed_weight_bytes + 4096, np.uint8)

    def packs(kernel: Kernel, **given: int) -> bool:
        struct = make_weights(w.ctypes.data, 32, scales=scales.ctypes.data, **given)
        try:
            kernel.native.pack_weights(struct, memory.ctypes.data + -memory.ctypes.data % 64)
        except KernelRejected:
            return False
        return True

    assert packs(signed)
    assert not packs(signed, float_zero_points=zero_points.ctypes.data)
    assert not packs(unsigned)
    assert packs(unsigned, float_zero_points=zero_points.ctypes.data)
    assert not packs(
        unsigned,
        zero_points=bytes_too.ctypes.data,
        float_zero_points=zero_points.ctypes.data,
    )


def test_callers_without_a_place_for_float_zero_points_are_served(toolchain: Toolchain) -> None:
    kernel = _load("f32_u4 1x2x32 nk:g32 none", family_named("scalar_w4"), toolchain)
    w, scales = np.full((2, 16), 0x21, np.uint8), np.ones((2, 1), np.float32)
    zero_points = np.zeros((2, 1), np.uint8)
    expected = kernel.pack(w, scales=scales, zero_points=zero_points)
    struct = make_weights(
        w.ctypes.data, 32, scales=scales.ctypes.data, zero_points=zero_points.ctypes.data
    )
    struct.size_bytes = WeightsStruct.float_zero_points.offset
    struct.float_zero_points = 1  # no address: what lies there is not read
    packed = kernel.pack(w, scales=scales, zero_points=zero_points + np.uint8(1))

    kernel.native.pack_weights(struct, packed.memory.ctypes.data)

    assert np.array_equal(packed.memory, expected.memory)


def test_numbers_worked_out_by_hand(toolchain: Toolchain) -> None:
    kernel = _load("f32_u4 1x2x33 nk:g32 none", family_named("scalar_w4"), toolchain)
    x = np.zeros((1, 33), np.float32)
    x[0, [0, 1, 32]] = 1.0, 10.0, 100.0
    w = np.zeros((2, 17), np.uint8)
    w[0, 0], w[0, 16] = 0x3F, 0x05  # elements 15, 3 and, in the second group, 5
    w[1, 0], w[1, 16] = 0x20, 0x0E  # elements 0, 2 and 14
    scales = np.array([[0.5, 2.0], [1.0, 0.25]], np.float32)
    zero_points = np.array([[7, 4], [1, 15]], np.uint8)

    y = np.asarray(kernel(x, kernel.pack(w, scales=scales, zero_points=zero_points)))

    assert y.tolist() == [
        [
            0.5 * (8 * 1 - 4 * 10) + 2.0 * 1 * 100,
            1.0 * (-1 * 1 + 1 * 10) + 0.25 * -1 * 100,
        ]
    ]


def _load(problem: str, family: MicroKernelFamily, toolchain: Toolchain) -> Kernel:
    asked = Problem.parse(problem)
    candidate = Candidate.parse(_candidate(family, asked.k))
    build = compile_kernel(render(asked, candidate, family), isa=family.isa, toolchain=toolchain)
    assert isinstance(build, Build)
    return load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())


def _x_of(kernel: Kernel, random: np.random.Generator) -> np.ndarray:
    shape = kernel.problem.m.high, kernel.problem.k
    return random.standard_normal(shape, np.float32).astype(NUMPY_TYPES[kernel.problem.types.x])
