"""Numbers at the ends of their types: sums of bytes, ties, limits of y, subnormals, infinities."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import pytest
from grids import toolchain_for_grid_of
from needs import each_with, need_proof
from numpy.typing import NDArray
from other_encoding import spelled_for_this_cpu
from proof import run_kernel

from gemm_tuner import quantise_weights
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.drivers import build_driver
from gemm_tuner.bench.forked import Death
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.dtype import F32, DType
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.space.catalog import CATALOG

FAMILIES = list(CATALOG.values())
OF_BYTES = [family for family in FAMILIES if any(types.x.is_integer for types in family.types)]
OF_FLOATS = [family for family in FAMILIES if F32 in family.types]
OF_ZERO_POINTS = [
    (family, extras)
    for family in FAMILIES
    if family.layout is PackedLayout.GROUPS
    for extras in ("", " convert_once")
    if not (extras and family.is_in_fixed_point)
]

# The deepest sums that docs/kernels.md says stay in the range of s32.
DEEPEST = {"u8_s8": 65_793, "s8_u8": 65_793, "s8_s8": 65_793, "u8_u8": 33_025}
DEEPEST_WITH_OFFSET = 32_896


Array = NDArray[np.generic]


class Compute(Protocol):
    """Computes with a kernel of a family."""

    def __call__(
        self,
        problem: str,
        family: MicroKernelFamily,
        use: Callable[[Kernel], Array],
        extras: str = ...,
    ) -> Array: ...


def name_of(family: MicroKernelFamily) -> str:
    return family.name


@pytest.fixture(scope="module")
def compute() -> Compute:
    """Return what computes with a kernel with small tiles, of several vectors where there are such.

    It takes a problem, a family, words for the candidate and what to do with the kernel.
    """
    toolchain = find_toolchain()
    report = Report(build_driver("crash", toolchain))

    def run(
        problem: str, family: MicroKernelFamily, use: Callable[[Kernel], Array], extras: str = ""
    ) -> Array:
        need_proof(family.isa)
        asked = Problem.parse(problem)
        widest = 1 if family.layout is PackedLayout.COLUMNS else 2 * family.lanes
        fitting = [tile for tile in family.tiles if tile[1] <= widest]
        mr, nr = max(fitting, key=lambda one: one[::-1])
        kc = max(1, asked.k + -asked.k % family.k_step)
        candidate = Candidate.parse(
            f"{family.name}_{mr}x{nr} mc{mr}_nc{nr}_kc{kc} jc_ic_jr_ir{extras}"
        )
        source, isa = spelled_for_this_cpu(render(asked, candidate, family), family.isa)
        build = compile_kernel(source, isa=isa, toolchain=toolchain_for_grid_of(family))
        y = run_kernel(build, use, report, toolchain)
        assert not isinstance(y, Death), y
        return y

    return run


def extremes(dtype: DType, rows: int, k: int) -> Array:
    """Return rows of the greatest and of the least number there is, in turn."""
    limits = np.iinfo(NUMPY_TYPES[dtype])
    matrix = np.empty((rows, k), NUMPY_TYPES[dtype])
    matrix[::2], matrix[1::2] = limits.max, limits.min
    return matrix


def product(x: Array, w: Array, kernel: Kernel, **operands: Any) -> Array:  # noqa: ANN401 - of any kind
    return kernel(x, kernel.pack(w), **operands)


@pytest.mark.parametrize(("family", "types"), each_with(OF_BYTES, list(DEEPEST)))
def test_deepest_sums_of_extreme_bytes_are_exact(
    compute: Compute, family: MicroKernelFamily, types: str
) -> None:
    for epilogue in ("none", "x_zero_point"):
        k = DEEPEST[types] if epilogue == "none" else min(DEEPEST[types], DEEPEST_WITH_OFFSET)
        n = family.lanes + 1
        problem = Problem.parse(f"{types}_s32_s32 2x{n}x{k} nk {epilogue}")
        x, w = extremes(problem.types.x, 2, k), extremes(problem.types.w, n, k)
        offsets: dict[str, Any] = {}
        if epilogue != "none":
            offsets["x_zero_point"] = int(x[-1, 0])

        y = compute(problem.text, family, partial(product, x, w, **offsets))

        wide = x.astype(np.int64) - sum(offsets.values())
        np.testing.assert_array_equal(y, wide @ w.astype(np.int64).T)
        assert np.abs(np.asarray(y, np.int64)).max() > 2**29


@pytest.mark.parametrize(
    ("family", "y"), each_with(OF_BYTES, ["u8", "s8 y_zero_point", "u8 y_zero_point", "s8"])
)
def test_bytes_are_rounded_to_even_and_saturated(
    compute: Compute, family: MicroKernelFamily, y: str
) -> None:
    y_type, *offset = y.split()
    x = np.arange(256, dtype=np.uint8).reshape(-1, 1)
    w = np.array([1, -1, 3, 127, -128, *[0] * 7], np.int8)
    bias = np.zeros(len(w), np.float32)
    bias[5:] = np.nan, np.inf, -np.inf, 3e9, -3e9, 0.5, -0.5
    epilogue = "+".join(["scale", "bias", *offset])
    problem = Problem.parse(f"u8_s8_s32_{y_type} 256x{len(w)}x1 nk {epilogue}")
    zero: dict[str, Any] = {"y_zero_point": 7} if offset else {}
    operands = {"scale": 0.5, "bias": bias, **zero}

    rounded = compute(problem.text, family, partial(product, x, w.reshape(-1, 1), **operands))

    # Half of an odd number is a tie.
    limits = np.iinfo(NUMPY_TYPES[problem.types.y])
    halves = np.rint(x.astype(np.float64) * w * 0.5 + bias) + sum(zero.values())
    expected = np.clip(np.where(np.isnan(halves), limits.min, halves), limits.min, limits.max)
    np.testing.assert_array_equal(rounded, expected)


@pytest.mark.parametrize("family", OF_FLOATS, ids=name_of)
def test_subnormal_floats_are_read_and_written(compute: Compute, family: MicroKernelFamily) -> None:
    least = np.float32(2.0**-149)
    x = np.array([[1], [3], [12_345], [2**22], [2**23]], np.float32) * least
    x = np.concatenate([x, -x, [[np.float32(1.5)]]])
    w = np.array([1, -0.5, 1.999, 2.0**23, 2.0**100, 5 * least, 2.0**-126], np.float32)
    problem = f"f32 {len(x)}x{len(w)}x1 nk none"

    y = compute(problem, family, partial(product, x, w.reshape(-1, 1)))

    expected = x * w
    assert np.count_nonzero((expected != 0) & (np.abs(expected) < 2.0**-126)) > 20
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("family", "extras"), OF_ZERO_POINTS, ids=[one.name + extras for one, extras in OF_ZERO_POINTS]
)
def test_infinite_x_makes_no_number_of_weights_with_zero_points(
    compute: Compute, family: MicroKernelFamily, extras: str
) -> None:
    types = next(types for types in family.types if types.w in {DType.U8, DType.U4})
    k, n, rows = 70, family.lanes + 3, 5
    problem = f"{types.text} {rows}x{n}x{k} nk:g32 none"
    random = np.random.default_rng(5)
    x = random.integers(-3, 4, (rows, k)).astype(np.float32)
    x[1, 33], x[3, 69] = np.inf, -np.inf
    quantised = quantise_weights(random.standard_normal((n, k)), types.w.value, group=32)

    def use(kernel: Kernel) -> Array:
        packed = kernel.pack(
            quantised.w, scales=quantised.scales, zero_points=quantised.zero_points
        )
        return kernel(x.astype(NUMPY_TYPES[types.x]), packed)

    y = compute(problem, family, use, extras).astype(np.float32)

    assert not np.isfinite(y[[1, 3]]).any()
    assert np.isfinite(y[[0, 2, 4]]).all()
