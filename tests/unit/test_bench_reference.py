"""The result of a problem in float64, and the numbers that it is computed of."""

from itertools import combinations

import numpy as np
import pytest

from gemm_tuner.bench import inputs as numbers
from gemm_tuner.bench import reference
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.domain.problem import Problem


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_blocks_of_rows_and_columns_change_nothing(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.parse(f"u8_s8_s32_f32 70x37x50 {layout} x_zero_point+bias")
    inputs = make_inputs(problem, InputKind.NORMAL, 3)
    whole = compute_expected(problem, inputs)

    for name in ("_OF_X_AT_ONCE", "_OF_W_AT_ONCE"):
        monkeypatch.setattr(reference, name, 0)
    for name in ("_LEAST_ROWS", "_LEAST_COLUMNS"):
        monkeypatch.setattr(reference, name, 16)
    in_blocks = compute_expected(problem, inputs)

    np.testing.assert_array_equal(in_blocks.values, whole.values)
    np.testing.assert_array_equal(in_blocks.bounds, whole.bounds)


@pytest.mark.parametrize("kind", [InputKind.NORMAL, InputKind.EXACT])
def test_numbers_that_come_again_are_in_no_two_rows_alike(
    kind: InputKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "_PERIOD", 101)
    problem = Problem.parse("f32 9x8x64 nk none")

    made = make_inputs(problem, kind, 3)

    for array in (made.x, made.w):
        assert all((one != other).any() for one, other in combinations(array, 2))
