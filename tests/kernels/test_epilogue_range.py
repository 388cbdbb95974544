"""Each transcendental step over the whole range of float32, against the bounds of its table row."""

import numpy as np
import pytest
from needs import each, need_cpu
from numpy.typing import NDArray
from other_encoding import needed_here, spelled_for_this_cpu

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.bench.inputs import InputKind, Inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.micro_kernel import MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.space.catalog import CATALOG

STEPS = (
    "sigmoid",
    "silu",
    "tanh",
    "elu",
    "elu:-2.5",
    "mish",
    "gelu_tanh",
    "gelu_erf",
    "hardswish",
)


def values_to_try() -> NDArray[np.float32]:
    """Return both signs of every magnitude, densely where the steps bend, and what is no number."""
    magnitudes = np.concatenate(
        [
            np.geomspace(1e-45, 3.4e38, 4001),
            np.linspace(0.0, 20.0, 8001),
            np.linspace(80.0, 110.0, 3001),
        ]
    ).astype(np.float32)
    payloads = np.array([0x7FC00000, 0x7FC00001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    return np.concatenate(
        [
            magnitudes,
            -magnitudes,
            np.array([np.inf, -np.inf], np.float32),
            payloads.view(np.float32),
        ]
    )


# Those of weights in groups compute a step as the families of their type of x do.
FAMILIES = [
    family for family in CATALOG.values() if not any(types.is_weight_only for types in family.types)
]
# Families of the same vectors compute a step with the same functions: one has all, the others have
# a third each, by turns.
QUICK = {family.vectors.name: family.name for family in reversed(FAMILIES)}.values()
COMPUTED = [
    pytest.param(*one.values, step, id=f"{one.id}-{step}", marks=one.marks)
    for turn, (family, one) in enumerate(zip(FAMILIES, each(FAMILIES, quick=QUICK), strict=True))
    for step in (STEPS if family.name in QUICK else STEPS[turn % 3 :: 3])
]


@pytest.mark.parametrize(("family", "step"), COMPUTED)
def test_step_is_within_its_bound_for_every_value(family: MicroKernelFamily, step: str) -> None:
    need_cpu(needed_here(family.isa))
    types = min(family.types, key=lambda types: types.text)
    with np.errstate(over="ignore"):  # of f16
        bias = values_to_try().astype(NUMPY_TYPES[DType.F32 if types.y.is_integer else types.y])
    # Without products, each element of y is the step of one element of the bias.
    problem = Problem.create(1, len(bias), 0, dtype=types.text, epilogue=f"bias+{step}")
    x = np.zeros((1, 0), NUMPY_TYPES[types.x])
    w = np.zeros((len(bias), 0), NUMPY_TYPES[types.w])
    mr, nr = family.tiles[0]
    candidate = Candidate.parse(f"{family.name}_{mr}x{nr} mc{mr}_nc{nr}_kc1 jc_ic_jr_ir")
    source, isa = spelled_for_this_cpu(render(problem, candidate, family), family.isa)
    build = compile_kernel(source, isa=isa, toolchain=find_toolchain())
    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
    inputs = Inputs(
        kind=InputKind.EXACT, x=x, w=w, operands={"bias": bias}, row_operands=frozenset()
    )

    y = kernel(x, kernel.pack(w), bias=bias)

    assert find_error(compute_expected(problem, inputs), y) is None


@pytest.mark.parametrize("family", ["avx512_int8", "avx2_int8", "scalar_int8"])
def test_large_sums_are_whole_numbers_already(family: str) -> None:
    row = CATALOG[family]
    need_cpu(row.isa)
    mr, nr = row.tiles[0]
    problem = Problem.parse("int8 1x1x260 nk y_zero_point")
    candidate = Candidate.parse(f"{family}_{mr}x{nr} mc{mr}_nc{nr}_kc260 jc_ic_jr_ir")
    build = compile_kernel(render(problem, candidate, row), isa=row.isa, toolchain=find_toolchain())
    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
    x = np.full((1, 260), 255, np.uint8)
    w = np.full((1, 260), 127, np.int8)
    w[0, 130:] = 0
    w[0, 0] = 126  # the sum is odd, above 2^22
    exact = int(x.astype(np.int64)[0] @ w.astype(np.int64)[0])

    y = kernel(x, kernel.pack(w), y_zero_point=0)

    assert exact % 2 == 1
    assert exact > 2**22
    assert np.asarray(y)[0, 0] == exact
