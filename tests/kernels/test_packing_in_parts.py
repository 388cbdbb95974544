"""Weights packed in parts: each part packs what it reads in a call, in that order in memory."""

import json

import numpy as np
import pytest
from grids import grid_toolchain
from test_cuts import BANDS, FEW_ROWS, ONE_ROW, RANGE, SLICED, SQUARE, kernel_of, normal
from written import check_parts, written_by

from gemm_tuner.abi import OK, ArgsStruct, ArrayView, make_args
from gemm_tuner.arrays.weights import StoredWeights, check_weights
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.source import Source
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.memory import address_of, allocate_aligned
from gemm_tuner.runtime import pool
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import family_named

PARTS = (2, 3, 7, 16, 64)
# k in two blocks, so that each part has a piece of either.
BLOCKS = ("f32 1x400x64", "avx2_f32_1x16 mc1_nc400_kc32 jc_ic_jr_ir")
BATCH = ("f32 1..8x100x40 kn", "avx2_f32_4x16 mc8_nc112_kc40 jc_ic_jr_ir")


def weights_of(kernel: Kernel) -> StoredWeights:
    return check_weights(kernel.problem, normal(*kernel.problem.w_shape))


@pytest.mark.parametrize("chosen", [SQUARE, FEW_ROWS, ONE_ROW, RANGE, BANDS, SLICED, BLOCKS, BATCH])
def test_parts_write_what_one_writes_each_byte_once(chosen: tuple[str, str]) -> None:
    kernel = kernel_of(*chosen)

    for parts in PARTS:
        check_parts(kernel.native, weights_of(kernel), parts)


@pytest.mark.parametrize(("chosen", "blocks"), [(ONE_ROW, 1), (FEW_ROWS, 1), (BLOCKS, 2)])
def test_packed_weights_lie_in_the_order_of_the_parts(chosen: tuple[str, str], blocks: int) -> None:
    kernel = kernel_of(*chosen)

    end_of_first_block = 0
    for part in range(5):
        written, _packed = written_by(kernel.native, weights_of(kernel), part, 5)
        edges = np.flatnonzero(np.diff(written, prepend=False, append=False))
        assert len(edges) == 2 * blocks
        assert edges[0] == end_of_first_block
        end_of_first_block = edges[1]


@pytest.mark.parametrize("parts", [2, 4, 7, 16, 32])
@pytest.mark.parametrize(("chosen", "m"), [(ONE_ROW, 1), (RANGE, 1), (BLOCKS, 1)])
def test_a_part_reads_what_it_packed(chosen: tuple[str, str], m: int, parts: int) -> None:
    kernel = kernel_of(*chosen)
    problem, native = kernel.problem, kernel.native
    x, bias = normal(m, problem.k), normal(problem.n)
    weights = weights_of(kernel)
    packed = allocate_aligned(native.packed_weight_bytes)
    workspace = allocate_aligned(native.workspace_bytes(parts))

    y = np.full((m, problem.n), 3e38, np.float32)
    for part in range(parts):
        packed.fill(255)  # the bytes of a NaN
        native.pack_weights(weights.struct, address_of(packed), part=part, parts=parts)
        args = make_args(
            m=m,
            x=ArrayView(address_of(x), problem.k),
            packed_w=address_of(packed),
            y=ArrayView(address_of(y), problem.n),
            operands=[ArrayView(address_of(bias), 0) for _one in problem.epilogue.operands],
            workspace=address_of(workspace),
        )
        assert native.run(args, 0, part, parts) == OK

    w = weights.w if problem.w_layout == "nk" else weights.w.T
    expected = x.astype(np.float64) @ w.T + (bias if problem.epilogue.operands else 0)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_native", [True, False], ids=["pool in C", "pool in Python"])
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_of_the_pool_pack_the_bytes_of_one(
    threads: int, monkeypatch: pytest.MonkeyPatch, *, is_native: bool
) -> None:
    alone = kernel_of(*BATCH)
    shared = Kernel(alone.native, alone.artifact, threads)
    monkeypatch.setattr(alone.native, "preferred_parts", threads)
    w = normal(7, *alone.problem.w_shape)
    if not is_native:
        monkeypatch.setattr(pool, "NATIVE", None)

    one, batch = shared.pack(w[0]), shared.pack_batch(w)

    assert one.memory.tobytes() == alone.pack(w[0]).memory.tobytes()
    for product, packed in zip(w, batch.products, strict=True):
        size_bytes = alone.native.packed_weight_bytes
        assert packed[:size_bytes].tobytes() == alone.pack(product).memory.tobytes()


def test_a_kernel_of_version_2_is_packed_and_called() -> None:
    problem, candidate = map(str, BATCH)
    parsed = Candidate.parse(candidate)
    family = family_named(parsed.micro_kernel.family)
    text = render(Problem.parse(problem), parsed, family).text
    old = text.replace("abi_version() { return 3", "abi_version() { return 2")
    old = old.replace("pack_weights_part", "not_yet")
    source = Source(text=old, abi_version=2)
    build = compile_kernel(source, isa=family.isa, toolchain=grid_toolchain(as_served=False))
    w, x = normal(40, 100), normal(8, 40)

    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu(), threads=2)
    y = kernel(x, kernel.pack(w), threads=3)

    assert not hasattr(kernel.native._library, "gemm_tuner_pack_weights_part")
    np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)


def test_a_caller_of_version_3_need_not_know_what_came_later() -> None:
    kernel = kernel_of(*BATCH)
    w, x, y = normal(40, 100), normal(8, 40), np.zeros((8, 100), np.float32)
    packed = kernel.pack(w)
    said = kernel.native._library.gemm_tuner_abi_version()
    described = json.loads(kernel.native.describe())["abi_version"]
    assert (said, described, kernel.artifact.abi_version) == (3, 3, 3)
    args = make_args(
        m=8,
        x=ArrayView(address_of(x), 40),
        packed_w=address_of(packed.memory),
        y=ArrayView(address_of(y), 100),
        operands=[],
        workspace=0,
    )

    args.size_bytes = ArgsStruct.w.offset - 8
    assert kernel.native.run(args, 0, 0, 1) != OK
    args.size_bytes = ArgsStruct.w.offset
    args.heads = -1  # as whatever lies behind
    assert kernel.native.run(args, 0, 0, 1) == OK
    np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)
