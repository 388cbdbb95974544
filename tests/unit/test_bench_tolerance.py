import numpy as np
import pytest
from numpy.typing import NDArray

from gemm_tuner.bench.inputs import InputKind, Inputs, make_inputs
from gemm_tuner.bench.reference import compute_expected, round_to_y
from gemm_tuner.bench.tolerance import Expected, find_error, shares_of_bounds
from gemm_tuner.domain.dtype import TERMS_IN_F16, DType, OperandTypes
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.problem import Problem

PROBLEM = Problem.parse("f32 24x40x300 nk none")
FLOAT_STEPS = sorted(name for name, kind in STEP_KINDS.items() if not kind.is_offset)


def _product(inputs: Inputs, k: int) -> NDArray[np.float32]:
    result: NDArray[np.float32] = inputs.x[:, :k] @ inputs.w[:, :k].T
    return result


@pytest.mark.parametrize("kind", list(InputKind))
def test_float32_product_is_within_its_bound(kind: InputKind) -> None:
    inputs = make_inputs(PROBLEM, kind, 1)

    with np.errstate(invalid="ignore"):
        result = _product(inputs, PROBLEM.k)

    assert find_error(compute_expected(PROBLEM, inputs), result) is None


@pytest.mark.parametrize("kind", [InputKind.NORMAL, InputKind.EXACT])
def test_missing_term_of_all_sums_is_found(kind: InputKind) -> None:
    inputs = make_inputs(PROBLEM, kind, 1)

    result = _product(inputs, PROBLEM.k - 1)

    assert find_error(compute_expected(PROBLEM, inputs), result) is not None


@pytest.mark.parametrize("k", [3, 300, 20_000])
def test_missing_term_of_one_sum_is_found(k: int) -> None:
    problem = Problem.create(3, 5, k)
    inputs = make_inputs(problem, InputKind.EXACT, 1)
    inputs.x[1, k // 2] = inputs.w[2, k // 2] = np.float32(2.0 ** -round(np.log2(k) / 2))
    expected = compute_expected(problem, inputs)
    result = expected.values.astype(np.float32)

    result[1, 2] -= inputs.x[1, k // 2] * inputs.w[2, k // 2]

    error = find_error(expected, result)
    assert error is not None
    assert "y[1, 2]" in error


def test_wrong_element_is_named() -> None:
    inputs = make_inputs(PROBLEM, InputKind.NORMAL, 1)
    result = _product(inputs, PROBLEM.k)

    result[7, 11] += 0.01

    error = find_error(compute_expected(PROBLEM, inputs), result)
    assert error is not None
    assert "1 of 960" in error
    assert "y[7, 11]" in error


@pytest.mark.parametrize("planted", [0.0, np.inf, -np.inf])
def test_nan_must_stay_nan(planted: float) -> None:
    inputs = make_inputs(PROBLEM, InputKind.SPECIAL, 1)
    expected = compute_expected(PROBLEM, inputs)
    result = expected.values.astype(np.float32)
    row, column = np.argwhere(np.isnan(result))[0]

    result[row, column] = planted

    assert find_error(expected, result) is not None


@pytest.mark.parametrize("epilogue", ["none", "scale+scale", "bias"])
def test_what_float32_cannot_hold_may_be_anything(epilogue: str) -> None:
    problem = Problem.parse(f"f32 1x3x3 nk {epilogue}")
    large = np.float32(3e38)
    inputs = make_inputs(problem, InputKind.NORMAL, 1)
    inputs.x[...] = [[large, large, -large]]
    inputs.w[...] = [[1, 1, 1], [1, 0, 0], [1e-9, 0, 0]]  # one overflows on the way
    for operand in inputs.operands.values():
        operand[...] = 1.5
    with np.errstate(all="ignore"):
        result = np.zeros((1, 3), np.float32)
        for at in range(3):
            result += inputs.x[:, at, np.newaxis] * inputs.w[:, at]
        for operand in inputs.operands.values():
            result = result + operand if epilogue == "bias" else result * operand
    assert np.isinf(result[0, 0])

    expected = compute_expected(problem, inputs)

    assert find_error(expected, result) is None
    assert (shares_of_bounds(expected, result) <= 1).all()
    result[0, 2] = np.inf
    assert find_error(expected, result) is not None


def test_infinity_must_keep_its_sign() -> None:
    inputs = make_inputs(PROBLEM, InputKind.SPECIAL, 1)
    expected = compute_expected(PROBLEM, inputs)
    result = expected.values.astype(np.float32)
    assert np.isinf(result).any()

    result[np.isinf(result)] *= -1

    assert find_error(expected, result) is not None


@pytest.mark.parametrize("step", FLOAT_STEPS)
def test_exact_result_rounded_to_float32_is_within_the_bound_of_each_step(step: str) -> None:
    problem = Problem.create(9, 17, 33, epilogue=step)
    inputs = make_inputs(problem, InputKind.SPECIAL, 3)
    expected = compute_expected(problem, inputs)

    result = expected.values.astype(np.float32)

    assert find_error(expected, result) is None


@pytest.mark.parametrize("step", FLOAT_STEPS)
def test_error_of_a_thousandth_after_each_step_is_found(step: str) -> None:
    problem = Problem.create(9, 17, 33, epilogue=step)
    expected = compute_expected(problem, make_inputs(problem, InputKind.EXACT, 3))
    result = expected.values.astype(np.float32)

    result[4, 5] += 1e-3

    assert find_error(expected, result) is not None


@pytest.mark.parametrize("y", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("bias", "step", "right", "wrong"),
    [
        (-6.5, "gelu_erf", (-np.inf, np.inf, np.nan), ()),  # a kernel may take it for zero
        (-9.0, "gelu_erf", (-np.inf, np.inf, np.nan), ()),
        (-9.0, "gelu_tanh", (-np.inf, np.inf, np.nan), ()),
        (-95.0, "silu", (-np.inf, np.inf, np.nan), ()),
        (-2.0, "gelu_erf", (-np.inf,), (np.inf, np.nan, 0.0)),
        (0.0, "gelu_erf", (np.nan,), (np.inf, 0.0)),
    ],
)
def test_next_to_nothing_times_infinity_may_be_anything(
    bias: float, step: str, right: tuple[float, ...], wrong: tuple[float, ...], y: str
) -> None:
    problem = Problem.parse(f"bf16_bf16_f32_{y} 1x1x0 nk bias+{step}+mul")
    inputs = make_inputs(problem, InputKind.EXACT, 1)
    inputs.operands["bias"][:] = bias
    inputs.operands["mul"][:] = np.inf

    expected = compute_expected(problem, inputs)

    for one in right:
        assert find_error(expected, np.array([[one]], np.float32)) is None
    for one in wrong:
        assert find_error(expected, np.array([[one]], np.float32)) is not None


def test_what_may_be_rounded_to_zero_times_infinity_may_be_anything() -> None:
    """In float64 gelu_erf(7.5) is a little less than 7.5; in float32 it is 7.5, which becomes 8."""
    problem = Problem.parse("f32 1x1x0 nk bias+gelu_erf+y_zero_point+mul")
    inputs = make_inputs(problem, InputKind.EXACT, 1)
    inputs.operands["bias"][:] = 7.5
    inputs.operands["y_zero_point"][...] = -7
    inputs.operands["mul"][:] = np.inf

    expected = compute_expected(problem, inputs)

    for one in (np.nan, np.inf):
        assert find_error(expected, np.array([[one]], np.float32)) is None


QUANTISED = "x_row_zero_point+row_scale+channel_scale+bias+y_zero_point"


@pytest.mark.parametrize("kind", list(InputKind))
def test_sums_of_bytes_are_exact(kind: InputKind) -> None:
    problem = Problem.parse("u8_s8_s32_s32 5x7x300 nk x_zero_point")
    inputs = make_inputs(problem, kind, 1)
    zero = inputs.operands["x_zero_point"].astype(np.int64)
    result = (inputs.x.astype(np.int64) - zero) @ inputs.w.astype(np.int64).T
    expected = compute_expected(problem, inputs)

    assert find_error(expected, result.astype(np.int32)) is None
    assert find_error(expected, (result + 1).astype(np.int32)) is not None


@pytest.mark.parametrize("types", ["u8_s8_s32_u8", "s8_s8_s32_s8"])
def test_bytes_are_rounded_to_even_and_saturated(types: str) -> None:
    problem = Problem.parse(f"{types} 40x60x30 nk {QUANTISED}")
    inputs = make_inputs(problem, InputKind.NORMAL, 1)
    operands = {name: array.astype(np.float64) for name, array in inputs.operands.items()}
    x = inputs.x.astype(np.float64) - operands["x_row_zero_point"][:, np.newaxis]
    value = x @ inputs.w.astype(np.float64).T * operands["row_scale"][:, np.newaxis]
    value = np.rint(value * operands["channel_scale"] + operands["bias"])
    limits = np.iinfo(inputs.x.dtype)
    result = np.clip(value + operands["y_zero_point"], limits.min, limits.max)
    expected = compute_expected(problem, inputs)

    assert {limits.min, limits.max} < set(result.ravel())
    assert find_error(expected, result.astype(inputs.x.dtype)) is None
    off_by_one = np.where(result < limits.max, result + 1, result - 1)
    assert "2400 of 2400" in (find_error(expected, off_by_one) or "")


HALVES = ("bf16", "f16")


def _exact_product(inputs: Inputs) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        product: NDArray[np.float64] = inputs.x.astype(np.float64) @ inputs.w.astype(np.float64).T
    return product


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", [InputKind.EXACT, InputKind.SPECIAL])
def test_exact_product_rounded_to_half_is_right_and_its_neighbour_wrong(
    dtype: str, kind: InputKind
) -> None:
    problem = Problem.parse(f"{dtype} 24x40x30 nk none")
    inputs = make_inputs(problem, kind, 1)
    with np.errstate(over="ignore"):
        result = _exact_product(inputs).astype(np.float32).astype(inputs.x.dtype)
    expected = compute_expected(problem, inputs)
    neighbours = result.copy()
    is_finite = np.isfinite(result.astype(np.float32)) & (result != 0)

    neighbours.view(np.uint16)[is_finite] += 1

    assert find_error(expected, result) is None
    assert f"{np.count_nonzero(is_finite)} of 960" in (find_error(expected, neighbours) or "")


def test_special_float16_has_results_that_are_subnormal_and_too_large() -> None:
    problem = Problem.parse("f16 24x40x3 nk none")

    inputs = make_inputs(problem, InputKind.SPECIAL, 1)

    y = np.abs(compute_expected(problem, inputs).values)

    assert np.count_nonzero((y > 0) & (y < 2.0**-14)) > 10
    assert np.count_nonzero(np.isinf(y) & np.isfinite(_exact_product(inputs))) > 5


@pytest.mark.parametrize(
    ("value", "bound", "right", "wrong"),
    [
        (65519.0, 0.5, (65504.0,), (np.inf, 65472.0, np.nan)),
        (65519.9, 0.5, (65504.0, np.inf), (np.nan,)),
        (65521.0, 0.5, (np.inf,), (65504.0, -np.inf, np.nan)),
        (-65521.0, 0.5, (-np.inf,), (-65504.0, np.inf)),
        (2.0**-25 * 1.01, 2.0**-45, (2.0**-24,), (0.0, 2.0**-23)),
        (2.0**-25, 2.0**-45, (0.0, 2.0**-24), (2.0**-23,)),
    ],
)
def test_float16_near_its_limits(
    value: float, bound: float, right: tuple[float, ...], wrong: tuple[float, ...]
) -> None:
    exact = Expected(values=np.array([[value]]), bounds=np.array([[bound]]))

    rounded = round_to_y(exact, OperandTypes.of(DType.F16))

    for y in right:
        assert find_error(rounded, np.array([[y]], np.float16)) is None
    for y in wrong:
        assert find_error(rounded, np.array([[y]], np.float16)) is not None


def _summed_in_f16(inputs: Inputs, terms: int) -> NDArray[np.float32]:
    """Return x @ w, with sums of `terms` products rounded to float16 after each."""
    total = np.zeros((len(inputs.x), len(inputs.w)), np.float32)
    partial = np.zeros(total.shape, np.float16)
    for p in range(inputs.x.shape[1]):
        if p % terms == 0:
            total, partial = total + partial, np.zeros_like(partial)
        product = inputs.x[:, p : p + 1].astype(np.float64) * inputs.w[:, p].astype(np.float64)
        partial = (partial.astype(np.float64) + product).astype(np.float16)
    result: NDArray[np.float32] = total + partial
    return result


@pytest.mark.parametrize("kind", [InputKind.NORMAL, InputKind.EXACT])
def test_accumulator_f16_allows_sums_of_64_products(kind: InputKind) -> None:
    types = "f16_f16_f16_f32"
    inputs = make_inputs(Problem.parse(f"{types} 24x40x300 nk none"), kind, 1)

    result = _summed_in_f16(inputs, TERMS_IN_F16)

    in_f16 = compute_expected(Problem.parse(f"{types} 24x40x300 nk none"), inputs)
    in_f32 = compute_expected(Problem.parse("f16_f16_f32_f32 24x40x300 nk none"), inputs)
    assert find_error(in_f16, result) is None
    assert (find_error(in_f32, result) is None) is (kind is InputKind.EXACT)
    assert find_error(in_f16, result * np.float32(1.5)) is not None


@pytest.mark.parametrize(
    ("dtype", "least_normal", "kind"),
    [
        ("f32", 2.0**-126, InputKind.EXACT),
        ("bf16", 2.0**-126, InputKind.EXACT),
        ("f16", 2.0**-14, InputKind.NORMAL),
    ],
)
def test_subnormal_numbers_are_where_they_cost_no_time(
    dtype: str, least_normal: float, kind: InputKind
) -> None:
    problem = Problem.parse(f"{dtype} 24x40x30 nk none")

    def has_subnormals(kind: InputKind) -> bool:
        inputs = make_inputs(problem, kind, 1)
        numbers = np.abs(np.concatenate([inputs.x.ravel(), inputs.w.ravel()]).astype(np.float64))
        return bool(np.any((numbers > 0) & (numbers < least_normal)))

    assert has_subnormals(kind)
    assert not has_subnormals(InputKind.EXACT if dtype == "f16" else InputKind.NORMAL)


def test_same_seed_gives_the_same_inputs() -> None:
    first = make_inputs(PROBLEM, InputKind.NORMAL, 5)
    second = make_inputs(PROBLEM, InputKind.NORMAL, 5)

    assert np.array_equal(first.x, second.x)
    assert np.array_equal(first.w, second.w)


def test_shares_of_bounds_are_above_one_where_an_element_is_wrong() -> None:
    values = np.array([[1.0, 0.0, np.nan, np.inf, np.nan, 5.0]])
    bounds = np.array([[0.5, 0.0, 0.0, 0.0, np.nan, np.inf]])
    expected = Expected(values=values, bounds=bounds)

    assert shares_of_bounds(expected, values).tolist() == [[0, 0, 0, 0, 0, 0]]
    moved = np.array([[1.25, 1e-30, 1.0, -np.inf, 3.0, 9.0]])
    assert shares_of_bounds(expected, moved).tolist() == [[0.5, np.inf, np.inf, np.inf, 0, 0]]
    lost = np.full((1, 6), np.nan)
    assert shares_of_bounds(expected, lost).tolist() == [[np.inf, np.inf, 0, np.inf, 0, np.inf]]


@pytest.mark.parametrize(("row", "column"), [(0, 0), (9_999, 7), (70_001, 3), (99_999, 9)])
def test_one_wrong_element_of_many_is_named(row: int, column: int) -> None:
    """They are compared a block of rows at a time."""
    values = np.arange(1_000_000, dtype=np.float64).reshape(100_000, 10) / 8
    expected = Expected(values=values, bounds=np.full_like(values, 1e-3))
    actual = values.astype(np.float32)
    assert find_error(expected, actual) is None

    actual[row, column] += 0.25

    error = find_error(expected, actual)
    assert error is not None
    assert f"1 of 1000000 elements are wrong; y[{row}, {column}] is" in error


def test_no_row_and_no_column_is_wrong_where_there_is_none() -> None:
    for shape in ((0, 5), (5, 0)):
        nothing = np.zeros(shape)
        expected = Expected(values=nothing, bounds=nothing)

        assert find_error(expected, nothing.astype(np.float32)) is None
