"""Quantise weights, and refuse those that do not go with a problem."""

from dataclasses import replace

import numpy as np
import pytest
from libraries import expected_of
from numpy.typing import NDArray

from gemm_tuner import quantise_weights
from gemm_tuner.arrays.quantise import QuantisedWeights, dequantise_weights
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray, InvalidProblem
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.libraries.plain import plain_problem, plain_weights

SEED = 11
TYPES = ["s8", "u8", "s4", "u4"]


def _matrix(n: int, k: int) -> NDArray[np.float32]:
    return np.random.default_rng(SEED).standard_normal((n, k), np.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("group", [32, 128, "k"])
def test_a_weight_is_at_most_half_a_step_off(dtype: str, layout: str, group: int | str) -> None:
    problem = Problem.create(1, 7, 171, dtype=f"f32_{dtype}", w_layout=f"{layout}:g{group}")
    columns = _matrix(7, 171)
    w = columns if layout == "nk" else columns.T

    quantised = quantise_weights(w, dtype, group=group, w_layout=layout)

    size = problem.w_group or 1
    steps = np.repeat(quantised.scales, size, axis=1)[:, :171]
    # The zero point is rounded as well: the ends of the range are cut by up to half a step more.
    allowed = 0.5001 if dtype[0] == "s" else 1.0001
    assert np.all(np.abs(dequantise_weights(problem, quantised) - columns) <= allowed * steps)


@pytest.mark.parametrize("dtype", TYPES)
def test_zero_stays_zero(dtype: str) -> None:
    w = _matrix(3, 64) + np.float32(5)
    w[:, 10] = 0
    w[2] = 0
    problem = Problem.create(1, 3, 64, dtype=f"f32_{dtype}", w_layout="nk:g32")

    back = dequantise_weights(problem, quantise_weights(w, dtype, group=32))

    assert not np.any(back[:, 10])
    assert not np.any(back[2])


def test_two_elements_share_a_byte_the_first_in_its_lower_half() -> None:
    w = np.array([[7.0, -1.0, 3.0]], np.float32)

    quantised = quantise_weights(w, "s4", group="k")

    assert quantised.scales.tolist() == [[1.0]]
    assert quantised.w.tolist() == [[0xF7, 0x03]]


@pytest.mark.parametrize(
    ("w", "dtype", "group", "error", "message"),
    [
        (np.full((2, 2), np.nan, np.float32), "s8", 32, InvalidArray, "NaN or infinity"),
        (np.ones(3, np.float32), "s8", 32, InvalidArray, "two dimensions"),
        (np.ones((2, 2), np.float32), "s32", 32, InvalidProblem, "s8, u8, s4, u4"),
        (np.ones((2, 99), np.float32), "s4", 33, InvalidProblem, "32, 64, 128 or k"),
    ],
)
def test_what_cannot_be_quantised_is_named(
    w: NDArray[np.float32], dtype: str, group: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantise_weights(w, dtype, group=group)


@pytest.mark.parametrize("types", ["f32_s8", "f32_u4", "bf16_u8", "bf16_s4_f32_f32"])
@pytest.mark.parametrize("layout", ["nk:g32", "kn:gk"])
def test_the_fallback_computes_the_same(types: str, layout: str) -> None:
    kernel = FallbackKernel(
        problem=Problem.parse(f"{types} 5x7x45 {layout} bias+relu"), reason="a test asked for it"
    )
    inputs = make_inputs(kernel.problem, InputKind.NORMAL, SEED)

    packed = kernel.pack(inputs.w, scales=inputs.scales, zero_points=inputs.zero_points)
    y = np.asarray(kernel(inputs.x, packed, bias=inputs.operands["bias"]))

    assert find_error(expected_of(kernel, inputs), y) is None


@pytest.mark.parametrize("types", ["f32_u8", "f32_s4"])
def test_the_plain_problem_is_the_same_layer_in_floats(types: str) -> None:
    problem = Problem.parse(f"{types} 5x7x45 kn:g32 bias")
    inputs = make_inputs(problem, InputKind.EXACT, SEED)

    plain = plain_problem(problem)
    assert inputs.scales is not None
    quantised = QuantisedWeights(inputs.w, inputs.scales, inputs.zero_points)
    plain_inputs = replace(
        inputs, w=plain_weights(problem, quantised), scales=None, zero_points=None
    )
    expected = compute_expected(plain, plain_inputs)

    assert plain.text == "f32 5x7x45 kn bias"
    assert np.array_equal(expected.values, compute_expected(problem, inputs).values)


def test_weights_that_do_not_go_with_the_problem_are_named() -> None:
    kernel = FallbackKernel(problem=Problem.parse("f32_u4 1x4x6 nk:gk"), reason="a test")
    w, scales = np.zeros((4, 3), np.uint8), np.ones((4, 1), np.float32)
    zero_points = np.zeros((4, 1), np.uint8)

    kernel.pack(w, scales=scales, zero_points=zero_points)
    with pytest.raises(InvalidArray, match=r"w has the shape \(4, 6\), but two elements of u4"):
        kernel.pack(np.zeros((4, 6), np.uint8), scales=scales, zero_points=zero_points)
    with pytest.raises(InvalidArray, match="scales is a NoneType"):
        kernel.pack(w, zero_points=zero_points)
    with pytest.raises(InvalidArray, match="zero_points is a NoneType"):
        kernel.pack(w, scales=scales)
    with pytest.raises(InvalidArray, match="scales has the shape"):
        kernel.pack(w, scales=np.ones((4, 2), np.float32), zero_points=zero_points)
    with pytest.raises(InvalidArray, match="must be dense"):
        kernel.pack(w, scales=np.ones((4, 2), np.float32)[:, :1], zero_points=zero_points)
    plain = FallbackKernel(problem=Problem.parse("f32 1x4x6"), reason="a test")
    with pytest.raises(InvalidArray, match="have no scales"):
        plain.pack(np.zeros((4, 6), np.float32), scales=scales)
