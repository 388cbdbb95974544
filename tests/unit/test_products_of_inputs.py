"""The inputs and results of several products in a call, which the proof compares."""

from dataclasses import replace

import numpy as np
import pytest

from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.domain.problem import Problem

PRODUCTS = 6
M, N, K = 5, 7, 4


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_each_product_of_two_activations_has_inputs_of_its_own(layout: str) -> None:
    problem = Problem.parse(f"matmul f32 {M}x{N}x{K} {layout} bias+row_scale+add")
    inputs = make_inputs(problem, InputKind.NORMAL, seed=3)
    expected = compute_expected(problem, inputs)

    products = inputs.of_products(problem, PRODUCTS)
    right = expected.of_products(problem, PRODUCTS)

    rows_of_w = problem.w_shape[0]
    for number in range(PRODUCTS):
        rows = slice(M * number, M * number + M)
        of_w = slice(rows_of_w * number, rows_of_w * (number + 1))
        operands = {
            "bias": products.operands["bias"][number],
            "row_scale": products.operands["row_scale"][rows],
            "add": products.operands["add"][rows],
        }
        alone = replace(inputs, x=products.x[rows], w=products.w[of_w], operands=operands)
        np.testing.assert_array_equal(right.values[rows], compute_expected(problem, alone).values)
    assert len({products.x[M * number].tobytes() for number in range(M)}) == M
    assert len({products.w[rows_of_w * number :][:rows_of_w].tobytes() for number in range(6)}) == 6


def test_products_with_weights_packed_ahead_share_them() -> None:
    problem = Problem.parse(f"f32 {M}x{N}x{K} nk bias+add")
    inputs = make_inputs(problem, InputKind.NORMAL, seed=3)

    products = inputs.of_products(problem, PRODUCTS)
    right = compute_expected(problem, inputs).of_products(problem, PRODUCTS)

    assert products.w is inputs.w
    assert products.operands["bias"] is inputs.operands["bias"]
    for number in range(PRODUCTS):
        rows = slice(M * number, M * number + M)
        operands = {**inputs.operands, "add": products.operands["add"][rows]}
        alone = replace(inputs, x=products.x[rows], operands=operands)
        np.testing.assert_array_equal(right.values[rows], compute_expected(problem, alone).values)
