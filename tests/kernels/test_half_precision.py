"""Numbers of 16 bits: all of them are read, and products are rounded to them."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest
from grids import toolchain_for_grid_of
from needs import each, need_cpu
from numpy.typing import NDArray
from pairs import all_pairs
from proof import Subject, prove_all
from rows import LIKE_BF16, small_tile

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.micro_kernel import MicroKernelFamily, PackedLayout
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.source import Source
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.space.catalog import CATALOG

ALL_BITS = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1)
# Products with these are ties, subnormal, too large, or have up to twice the digits.
FACTORS = {
    DType.F16: (1, -1, 0.5, 1 + 2.0**-10, 1.5, 2.0**-10, 3 * 2.0**-24, 65504, 1.999),
    DType.BF16: (1, -1, 0.5, 1 + 2.0**-7, 1.5, 2.0**-10, 3 * 2.0**-133, 3.3895e38, 1.992),
}
# So often that columns fill two vectors of floats, one, and a part of one.
COPIES = 7
LEAST_NORMAL = 2.0**-126
EVEN_MODE = 0x1F80
FLUSHING_MODE = EVEN_MODE | 0x8040  # subnormal numbers are taken for zero and written as zero

SET_MODE = """
extern "C" __attribute__((visibility("default"))) void set_mode(unsigned mode) {
    __builtin_ia32_ldmxcsr(mode);
}
"""

CASES = [
    pytest.param(family, dtype, word, id=f"{family.name}-{dtype.value}{word.replace(' ', '-')}")
    for dtype in FACTORS
    for family in CATALOG.values()
    if (types := OperandTypes.of(dtype)) in family.types
    for word in ("", " convert_once")
    if not word or family.converts_weights(types)
]
WIDENING = [
    family
    for family in CATALOG.values()
    if family.layout is PackedLayout.PANELS and any(map(family.converts_weights, family.types))
]


def multiply(family: MicroKernelFamily, dtype: DType, word: str, y: str) -> NDArray[np.generic]:
    """Return each number times each factor, computed by a kernel."""
    need_cpu(family.isa)
    x, w = numbers(dtype), factors(dtype)
    widest = 4 if family.layout is PackedLayout.COLUMNS else 2 * family.lanes
    mr, nr = max((tile for tile in family.tiles if tile[1] <= widest), key=lambda one: one[::-1])
    problem = Problem.create(len(x), len(w), 1, dtype=f"{dtype}_{dtype}_f32_{y}")
    candidate = Candidate.parse(
        f"{family.name}_{mr}x{nr} mc{mr}_nc{nr}_kc{family.k_step} jc_ic_jr_ir{word}"
    )
    build = compile_kernel(
        render(problem, candidate, family), isa=family.isa, toolchain=toolchain_for_grid_of(family)
    )
    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
    return kernel(x, kernel.pack(w))


def numbers(dtype: DType) -> NDArray[np.generic]:
    return ALL_BITS.view(NUMPY_TYPES[dtype])


def factors(dtype: DType) -> NDArray[np.generic]:
    return np.array(FACTORS[dtype] * COPIES, NUMPY_TYPES[dtype]).reshape(-1, 1)


def exact_products(family: MicroKernelFamily, dtype: DType) -> NDArray[np.float32]:
    """Return the products, which are exact in float32 if they are normal.

    The instructions for bfloat16 take subnormal numbers for zero, and write none.
    """
    x, w = numbers(dtype).astype(np.float32), factors(dtype).astype(np.float32)
    flushes = IsaFeature.AVX512_BF16 in family.isa
    if flushes:
        x, w = without_subnormals(x), without_subnormals(w)
    with np.errstate(invalid="ignore", over="ignore"):
        products: NDArray[np.float32] = x * w.T
    return without_subnormals(products) if flushes else products


def without_subnormals(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.abs(values) < LEAST_NORMAL, np.float32(0), values)


@pytest.mark.parametrize(("family", "dtype", "word"), CASES)
def test_every_number_is_read_as_it_is(family: MicroKernelFamily, dtype: DType, word: str) -> None:
    y = multiply(family, dtype, word, "f32")

    np.testing.assert_array_equal(y, exact_products(family, dtype))


@pytest.mark.parametrize(("family", "dtype", "word"), CASES)
def test_products_are_rounded_to_even_and_to_infinity(
    family: MicroKernelFamily, dtype: DType, word: str
) -> None:
    exact = exact_products(family, dtype)
    with np.errstate(over="ignore"):
        expected = exact.astype(NUMPY_TYPES[dtype]).astype(np.float32)
    assert np.isinf(expected).sum() > np.isinf(exact).sum()

    y = multiply(family, dtype, word, dtype.value)

    np.testing.assert_array_equal(y.astype(np.float32), expected)


@pytest.mark.parametrize(
    ("family", "dtype", "word"), [case for case in CASES if case.values[1] == "f16"]
)
def test_numbers_of_f16_do_not_depend_on_the_mode_of_the_cpu(
    family: MicroKernelFamily, dtype: DType, word: str, tmp_path: Path
) -> None:
    with flushed_to_zero(tmp_path):
        y = multiply(family, dtype, word, "f16")

    expected = exact_products(family, dtype)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y, expected.astype(np.float16))


@pytest.mark.proof
@pytest.mark.parametrize("family", each(WIDENING))
def test_weights_converted_once_serve_all_tiles(family: MicroKernelFamily) -> None:
    """What is converted are blocks of k and columns, for any rows and however w was packed.

    Kernels like those of bf16 have each block once.
    """
    texts = sorted(types.text for types in family.types)
    mr, nr = small_tile(family)
    blocks = list(product((5 * nr, 3 * nr + family.lanes + 1), ((64, 64), (131, 32))))
    extras = (" convert_once", " pack_x convert_once pf4096 u2", " convert_once pf_next grid1x2")
    rows, layouts = (f"0..{7 * mr}", 3 * mr + 1), ("nk", "kn")
    if family.name in LIKE_BF16:
        ways = list(
            zip(blocks, cycle(extras), cycle(texts), cycle(rows), cycle(layouts), strict=False)
        )
    else:
        ways = all_pairs(blocks, extras, texts, rows, layouts)
    subjects = [
        Subject(
            problem=f"{types} {m}x{n}x{k} {layout} bias+relu",
            candidate=f"{family.name}_{mr}x{nr} mc{2 * mr}_nc{2 * nr}_kc{kc} jc_ic_jr_ir{extra}",
        )
        for (n, (k, kc)), extra, types, m, layout in ways
    ]

    wrong = prove_all(subjects, toolchain_for_grid_of(family))

    assert not wrong


@contextmanager
def flushed_to_zero(folder: Path) -> Iterator[None]:
    """Have this thread take subnormal numbers of float32 for zero meanwhile."""
    build = compile_kernel(Source(text=SET_MODE), isa=frozenset(), toolchain=find_toolchain())
    library = folder / "mode.so"
    library.write_bytes(build.binary)
    set_mode = ctypes.CDLL(str(library)).set_mode
    set_mode(FLUSHING_MODE)
    try:
        assert np.float32(1e-30) * np.float32(1e-10) == 0
        yield
    finally:
        set_mode(EVEN_MODE)
