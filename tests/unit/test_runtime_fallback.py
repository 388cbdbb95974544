"""NumPy in the place of a kernel: the same calls, the same results, the same refusals."""

from typing import Any

import numpy as np
import pytest

from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidArray
from gemm_tuner.runtime.fallback import FallbackKernel

SEED = 3
FLOAT_STEPS = [name for name, kind in STEP_KINDS.items() if not kind.is_offset]


def _fallback(text: str) -> FallbackKernel:
    return FallbackKernel(problem=Problem.parse(text), reason="a test asked for it")


@pytest.mark.parametrize("epilogue", ["none", "bias+gelu_erf+add+mul+add", *FLOAT_STEPS])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_every_step_is_computed(epilogue: str, layout: str) -> None:
    kernel = _fallback(f"f32 5x7x9 {layout} {epilogue}")
    inputs = make_inputs(kernel.problem, InputKind.NORMAL, SEED)
    operands: dict[str, Any] = {**inputs.operands}
    out = np.empty((5, 7), np.float32)

    y = kernel(inputs.x, kernel.pack(inputs.w), out=out, **operands)

    assert y is out
    assert find_error(compute_expected(kernel.problem, inputs), out) is None


@pytest.mark.parametrize(
    "text",
    [
        "u8_s8_s32_s32 5x7x9 nk x_zero_point",
        "s8_s8_s32_f32 5x7x9 nk x_row_zero_point+row_scale+channel_scale+bias+relu",
        "u8_s8_s32_u8 5x7x9 kn x_zero_point+scale+bias+gelu_erf+scale+y_zero_point",
        "u8_s8_s32_bf16 5x7x9 kn none",
        "u8_s8_s32_f16 5x7x9 kn row_scale",
        "f16 5x7x9 nk bias+silu",
    ],
)
def test_layers_of_narrow_types_are_computed(text: str) -> None:
    kernel = _fallback(text)
    inputs = make_inputs(kernel.problem, InputKind.NORMAL, SEED)
    operands: dict[str, Any] = {**inputs.operands}

    y = kernel(inputs.x, kernel.pack(inputs.w), **operands)

    assert find_error(compute_expected(kernel.problem, inputs), y) is None


def test_a_range_of_rows_is_accepted() -> None:
    kernel = _fallback("f32 0..4x3x2")
    packed = kernel.pack(np.ones((3, 2), np.float32))

    for rows in range(5):
        y = kernel(np.ones((rows, 2), np.float32), packed)
        assert np.array_equal(y, np.full((rows, 3), 2, np.float32))


@pytest.mark.parametrize(
    ("x", "operands", "message"),
    [
        (np.ones((5, 2), np.float32), {"bias": np.ones(3, np.float32)}, r"shape \(5, 2\)"),
        (np.ones((4, 2), np.float64), {"bias": np.ones(3, np.float32)}, "float64"),
        (np.ones((2, 4), np.float32).T, {"bias": np.ones(3, np.float32)}, "ascontiguousarray"),
        ([[1.0, 2.0]], {"bias": np.ones(3, np.float32)}, "x has the shape"),
        (np.ones((4, 2), np.float32), {}, "reads bias, but got none"),
        (np.ones((4, 2), np.float32), {"bais": np.ones(3, np.float32)}, "but got bais"),
        (np.ones((4, 2), np.float32), {"bias": np.ones(4, np.float32)}, r"shape \(4,\)"),
    ],
)
def test_a_wrong_array_is_named(x: Any, operands: dict[str, Any], message: str) -> None:  # noqa: ANN401 - users pass anything
    kernel = _fallback("f32 4x3x2 nk bias")
    packed = kernel.pack(np.ones((3, 2), np.float32))

    with pytest.raises(InvalidArray, match=message):
        kernel(x, packed, **operands)
