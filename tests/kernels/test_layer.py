"""A layer for several m: which kernel computes what, from which packed copy."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from grids import grid_toolchain
from numpy.typing import NDArray

from gemm_tuner.arrays.dlpack import AnyArray, SharedArray
from gemm_tuner.arrays.packed import PackedWeights
from gemm_tuner.build.compile import Build, compile_kernels
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.measurement import Library
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray
from gemm_tuner.libraries.fallback import FallbackKernel, NoKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.layer import Layer, make_layer
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import family_named

Array = NDArray[np.float32]

N, K = 21, 30
EPILOGUE = "row_scale+bias+add"
# One format for all but m = 4.
TILES = {"1": "1x8", "4": "4x2", "16": "1x8", "17..20": "1x8"}
RANDOM = np.random.default_rng(3)
W = RANDOM.standard_normal((N, K), np.float32)
BIAS = RANDOM.standard_normal(N, np.float32)


def problem(rows: str) -> Problem:
    return Problem.create(rows, N, K, epilogue=EPILOGUE)


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    """Return a kernel for each of some m."""
    sources = []
    for rows, tile in TILES.items():
        candidate = Candidate.parse(f"scalar_f32_{tile} mc40_nc24_kc{K} jc_ic_jr_ir")
        family = family_named(candidate.micro_kernel.family)
        sources.append((render(problem(rows), candidate, family), family.isa))
    built = compile_kernels(sources, toolchain=grid_toolchain(as_served=False))
    return {
        rows: load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
        for rows, build in zip(TILES, built, strict=True)
        if isinstance(build, Build)
    }


def layer_of(kernels: dict[str, Kernel], *rows: str) -> Layer:
    return Layer([kernels[one] for one in rows])


class CountingKernel(Kernel):
    """A kernel that notes how many rows each of its calls has."""

    called: ClassVar[list[int]] = []

    def __call__(
        self, x: AnyArray, packed: PackedWeights | SharedArray, v: object = None, **named: object
    ) -> AnyArray:
        self.called.append(len(np.asarray(x)))
        return super().__call__(x, packed, v, **named)  # type: ignore[arg-type]  # by their names


def assert_computes(layer: Layer, rows: int, *, has_out: bool = False) -> None:
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, K + 5), np.float32)[:, :K]
    scale = random.standard_normal(rows, np.float32)
    residual = random.standard_normal((rows, N), np.float32)
    out = np.full((rows, N + 3), np.nan, np.float32)[:, :N] if has_out else None

    y = layer(x, layer.pack(W), out=out, row_scale=scale, bias=BIAS, add=residual)

    expected = (x.astype(np.float64) @ W.T) * scale[:, np.newaxis] + BIAS + residual
    assert out is None or y is out
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_out", [False, True])
def test_any_number_of_rows_is_computed(kernels: dict[str, Kernel], *, has_out: bool) -> None:
    for asked in (("1", "16", "17..20"), ("1",), ("1", "4", "16")):
        for rows in range(60):
            assert_computes(layer_of(kernels, *asked), rows, has_out=has_out)


@pytest.mark.parametrize(
    ("asked", "rows", "calls"),
    [
        (("1", "4", "16"), 16, [16]),
        (("1", "4", "16"), 37, [16, 16, 4, 1]),
        (("1", "4", "16"), 31, [16, 16]),
        (("1", "16"), 5, [1, 1, 1, 1, 1]),
        (("4", "16"), 19, [16, 4]),
        (("4", "17..20"), 21, [20, 4]),
        (("1", "17..20"), 19, [19]),
    ],
)
def test_few_calls_compute_other_numbers_of_rows(
    asked: tuple[str, ...],
    rows: int,
    calls: list[int],
    kernels: dict[str, Kernel],
) -> None:
    chosen = [kernels[one] for one in asked]
    layer = Layer([CountingKernel(kernel.native, kernel.artifact) for kernel in chosen])
    CountingKernel.called.clear()

    assert_computes(layer, rows)
    assert CountingKernel.called == calls


def test_kernels_of_one_format_read_one_copy(kernels: dict[str, Kernel]) -> None:
    layer = layer_of(kernels, "1", "16", "17..20")

    packed = layer.pack(W)

    assert len(packed.copies) == len(layer.formats) == 1
    assert packed.size_bytes == kernels["1"].native.packed_weight_bytes


def test_kernels_of_two_formats_read_two_copies(kernels: dict[str, Kernel]) -> None:
    layer = layer_of(kernels, "1", "4", "16")

    assert len(layer.pack(W).copies) == 2
    assert_computes(layer, 21)


def test_fewer_rows_than_any_kernel_takes_are_refused(kernels: dict[str, Kernel]) -> None:
    layer = layer_of(kernels, "4", "16")
    packed = layer.pack(W)

    with pytest.raises(InvalidArray, match="x has 3 rows, too few for the kernels for"):
        layer(np.zeros((3, K), np.float32), packed)


def test_operands_of_another_height_are_refused(kernels: dict[str, Kernel]) -> None:
    layer = layer_of(kernels, "1", "16")
    operands = {
        "row_scale": np.ones(21, np.float32),
        "bias": BIAS,
        "add": np.zeros((21, N), np.float32),
    }
    x, packed = np.zeros((21, K), np.float32), layer.pack(W)

    for name in ("row_scale", "add"):
        longer = np.concatenate([operands[name], operands[name]])
        with pytest.raises(InvalidArray, match=f"{name} has the shape"):
            layer(x, packed, **{**operands, name: longer})  # type: ignore[arg-type]  # by name
    with pytest.raises(InvalidArray, match="out has the shape"):
        layer(x, packed, out=np.zeros((22, N), np.float32), **operands)  # type: ignore[arg-type]
    with pytest.raises(InvalidArray, match="reads row_scale, bias, add"):
        layer(x, packed, bias=BIAS)


def test_a_result_over_the_rows_of_a_later_piece_is_refused(kernels: dict[str, Kernel]) -> None:
    layer = layer_of(kernels, "1", "16")
    memory = np.zeros((40, K), np.float32)
    rows = 17
    operands = {
        "row_scale": np.ones(rows, np.float32),
        "bias": BIAS,
        "add": np.zeros((rows, N), np.float32),
    }

    with pytest.raises(InvalidArray, match="out overlaps x"):
        layer(memory[:rows], layer.pack(W), out=memory[16 : 16 + rows, :N], **operands)  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [None, "bare", "other"])
def test_what_is_not_packed_for_the_layer_is_refused(
    packed: str | None, kernels: dict[str, Kernel]
) -> None:
    layer = layer_of(kernels, "1")
    given = {"bare": kernels["1"].pack(W), "other": layer_of(kernels, "4").pack(W)}

    with pytest.raises(InvalidArray, match=r"layer.pack\(w\)|with this layer"):
        layer(np.zeros((1, K), np.float32), given.get(packed or ""))  # type: ignore[arg-type]


def test_one_library_computes_where_there_are_no_kernels(kernels: dict[str, Kernel]) -> None:
    problems = [problem(rows) for rows in ("1", "4", "16", "40")]
    openblas = Library(text="openblas 0.3.31 + pass", package="numpy 2.4.6")
    found: Sequence[Kernel | NoKernel] = [
        kernels["1"],
        NoKernel(reason="slow", compared_with=openblas),
        kernels["16"],
        NoKernel(reason="not tuned"),
    ]

    layer = make_layer(problems, found, threads=1)

    fallback = layer.kernels[-1]
    assert isinstance(fallback, FallbackKernel)
    assert fallback.problem.m.text == "4..40"
    assert fallback.reason.startswith("slow not tuned The comparison was with openblas 0.3.31")
    assert len(layer.formats) == 2
    for rows in (1, 2, 4, 16, 30, 40, 50):
        assert_computes(layer, rows)
