"""Conversion from and to float16: all its numbers, and products that are rounded to it."""

import numpy as np
import pytest
from numpy.typing import NDArray

from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.dtype import DType, OperandTypes
from gemm_tuner.domain.micro_kernel import MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.space.catalog import CATALOG

F16 = OperandTypes.of(DType.F16)
ALL_NUMBERS = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, 1)
# Products with these are ties, subnormal, too large, or have up to 22 digits.
FACTORS = np.array(
    [[1.0], [-1.0], [0.5], [1 + 2.0**-10], [1.5], [2.0**-10], [3 * 2.0**-24], [65504.0], [1.999]],
    np.float16,
)


@pytest.fixture(
    params=[family for family in CATALOG.values() if F16 in family.types],
    ids=lambda family: family.name,
)
def family(request: pytest.FixtureRequest) -> MicroKernelFamily:
    family: MicroKernelFamily = request.param
    missing = family.isa - detect_cpu().isa
    if missing:
        pytest.skip(f"this CPU lacks {sorted(missing)}")
    return family


def multiply(family: MicroKernelFamily, y: str) -> NDArray[np.generic]:
    """Return each number times each factor, computed by a kernel."""
    mr, nr = family.tiles[0]
    problem = Problem.create(len(ALL_NUMBERS), len(FACTORS), 1, dtype=f"f16_f16_f32_{y}")
    candidate = Candidate.parse(
        f"{family.name}_{mr}x{nr} mc{mr}_nc{nr}_kc{family.k_step} jc_ic_jr_ir"
    )
    build = compile_kernel(
        render(problem, candidate, family), isa=family.isa, toolchain=find_toolchain()
    )
    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
    return kernel(ALL_NUMBERS, kernel.pack(FACTORS))


def exact_products() -> NDArray[np.float32]:
    with np.errstate(invalid="ignore"):
        return ALL_NUMBERS.astype(np.float32) * FACTORS.astype(np.float32).T


def test_every_number_is_read_as_it_is(family: MicroKernelFamily) -> None:
    np.testing.assert_array_equal(multiply(family, "f32"), exact_products())


def test_products_are_rounded_to_even_and_to_infinity(family: MicroKernelFamily) -> None:
    with np.errstate(over="ignore"):
        expected = exact_products().astype(np.float16)
    is_subnormal = (expected != 0) & (np.abs(expected) < 2.0**-14)
    assert is_subnormal.any()
    assert np.isinf(expected).sum() > 2 * len(FACTORS)

    np.testing.assert_array_equal(multiply(family, "f16"), expected)
