"""x in fixed point: what it keeps of numbers far apart, tiny, infinite or not a number."""

import numpy as np
import pytest
from needs import each, each_with
from numpy.typing import NDArray
from other_encoding import spelled_for_this_cpu

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.arrays.quantise import store_elements
from gemm_tuner.bench.tolerance import summation_bound
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.micro_kernel import MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import CATALOG

FAMILIES = [family for family in CATALOG.values() if family.is_in_fixed_point]
N = 20
# How much of the largest number of a block is lost of another at most; docs/decisions/0021.
LOST = {"f32": 2.0**-30, "bf16": 2.0**-22}
FORMATS = [f"{x_type} {group}" for group in ("g32", "g128", "gk") for x_type in LOST]

Floats = NDArray[np.floating]


def product(
    family: MicroKernelFamily, x: Floats, w: NDArray[np.int16], *, x_type: str, group: str
) -> Floats:
    """Return x times weights whose scales are one; w: (n, k)."""
    w_type = "s8" if family.name.endswith("w8") else "s4"
    rows, k = x.shape
    problem = Problem.parse(f"{x_type}_{w_type}_f32_f32 {rows}x{len(w)}x{k} nk:{group} none")
    tile = f"{family.name}_{min(rows, 2)}x{2 * family.lanes}"
    candidate = Candidate.parse(f"{tile} mc{2 * rows}_nc{4 * family.lanes}_kc{k} jc_ic_jr_ir")
    source, isa = spelled_for_this_cpu(render(problem, candidate, family), family.isa)
    build = compile_kernel(source, isa=isa, toolchain=find_toolchain())
    kernel: Kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
    groups = 1 if group == "gk" else -(-k // int(group[1:]))
    packed = kernel.pack(store_elements(problem, w), scales=np.ones((len(w), groups), np.float32))
    return np.asarray(kernel(x.astype(NUMPY_TYPES[DType.parse(x_type)]), packed))


def random_weights(family: MicroKernelFamily, k: int) -> NDArray[np.int16]:
    most = 127 if family.name.endswith("w8") else 7
    return np.random.default_rng(3).integers(-most, most + 1, (N, k)).astype(np.int16)


@pytest.mark.parametrize(("family", "formats"), each_with(FAMILIES, FORMATS))
def test_numbers_far_apart_lose_what_is_promised_at_most(
    family: MicroKernelFamily, formats: str
) -> None:
    x_type, group = formats.split()
    k, block = 300, 32 if group == "g32" else 128
    random = np.random.default_rng(11)
    x = random.standard_normal((4, k)) * 2.0 ** random.integers(-35, 20, (4, k))
    x = x.astype(NUMPY_TYPES[DType.parse(x_type)]).astype(np.float64)
    w = random_weights(family, k)
    largest = np.repeat(np.maximum.reduceat(np.abs(x), range(0, k, block), axis=1), block, axis=1)
    w[::2] *= np.abs(x[0]) < largest[0, :k] * 2.0**-10  # the small ones are all that counts

    y = product(family, x, w, x_type=x_type, group=group)

    magnitudes = np.abs(w.T.astype(np.float64))
    bound = summation_bound(k + 5, DType.F32) * (np.abs(x) @ magnitudes)
    bound += LOST[x_type] * (largest[:, :k] @ magnitudes)
    assert np.all(np.abs(y - x @ w.T) <= bound)


@pytest.mark.parametrize("family", each(FAMILIES))
def test_the_largest_numbers_of_a_block_are_exact(family: MicroKernelFamily) -> None:
    random = np.random.default_rng(5)
    blocks, block = 40, 128
    x = np.zeros((blocks, blocks * block), np.float32)
    for i in range(blocks):  # one of 24 bits, with others up to 2^-6 of it
        exponents = random.integers(0, 6, block) + 5 * i - 95.0
        signs = random.choice([-1.0, 1.0], block)
        x[i, i * block : (i + 1) * block] = signs * random.uniform(1, 2, block) * 2.0**exponents
        x[i, i * block] = 2.0 ** (5 * i - 90) * random.uniform(1, 2)
    picked = np.arange(N) * 5 % block
    w = np.zeros((N, x.shape[1]), np.int16)
    w[np.arange(N)[:, None], picked[:, None] + block * np.arange(blocks)] = 1

    y = product(family, x, w, x_type="f32", group="g128")

    expected = np.stack([x[i, i * block + picked] for i in range(blocks)])
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("family", each(FAMILIES))
def test_subnormal_numbers_alone_in_a_block_are_kept(family: MicroKernelFamily) -> None:
    least = 2.0**-149
    x = np.zeros((3, 128), np.float32)
    x[:, :3] = np.array([[1, 2, 3], [2**15, -1, 5], [-7, 2**16, 0]]) * least
    w = random_weights(family, 128)

    y = product(family, x, w, x_type="f32", group="g64")

    np.testing.assert_array_equal(y, (x.astype(np.float64) @ w.T).astype(np.float32))


@pytest.mark.parametrize(("family", "x_type"), each_with(FAMILIES, list(LOST)))
def test_infinity_and_nan_follow_the_rules_and_stay_in_their_rows(
    family: MicroKernelFamily, x_type: str
) -> None:
    random = np.random.default_rng(9)
    x = random.integers(-3, 4, (6, 200)).astype(np.float32)
    w = random_weights(family, 200)
    w[:3, 77], w[:3, 199] = [1, -1, 0], [0, 2, -2]
    x[1, 77], x[3, 199], x[4, 5], x[4, 150] = np.inf, -np.inf, np.nan, np.inf

    y = product(family, x, w, x_type=x_type, group="g64")

    with np.errstate(invalid="ignore"):
        expected = x.astype(np.float64) @ w.T.astype(np.float64)
    np.testing.assert_array_equal(y, expected.astype(np.float32))
