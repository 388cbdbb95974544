import pytest

from gemm_tuner.bench.conditions import relative_spread
from gemm_tuner.bench.regimes import copies_of_weights, stride_of_copy
from gemm_tuner.bench.roofline import footprint_bytes, roofline_ns
from gemm_tuner.bench.verify import rows_to_check
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.problem import Problem, Rows

MIB = 1 << 20


@pytest.mark.parametrize("packed_bytes", [64, MIB, 60 * MIB, 700 * MIB])
def test_cold_copies_exceed_the_last_level_cache_twice(packed_bytes: int) -> None:
    copies = copies_of_weights(Regime.COLD_WEIGHTS, packed_bytes, 32 * MIB)

    assert copies >= 2
    assert copies * packed_bytes >= 64 * MIB


def test_cold_copies_of_small_weights_have_a_limit() -> None:
    copies = copies_of_weights(Regime.COLD_WEIGHTS, MIB, 4096 * MIB)

    assert copies == 256


@pytest.mark.parametrize("packed_bytes", [0, MIB])
def test_hot_weights_are_one_copy(packed_bytes: int) -> None:
    assert copies_of_weights(Regime.HOT, packed_bytes, 32 * MIB) == 1


def test_copies_start_at_cache_lines() -> None:
    assert [stride_of_copy(size) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_rows_to_check_are_the_ends_and_some_between() -> None:
    assert rows_to_check(Rows(low=7, high=7)) == (7,)
    assert rows_to_check(Rows(low=1, high=64)) == (1, 2, 32, 63, 64)
    assert rows_to_check(Rows(low=0, high=1)) == (0, 1)


def test_footprint_counts_each_array_once() -> None:
    problem = Problem.create(3, 5, 7, epilogue="bias+scale+add")

    assert footprint_bytes(problem, 3) == 4 * (3 * 7 + 5 * 7 + 3 * 5 + 5 + 1 + 3 * 5)


def test_roofline_is_the_longer_of_arithmetic_and_reading() -> None:
    problem = Problem.create(1, 1000, 1000)

    compute_bound = roofline_ns(problem, 1, peak_flop_per_s=1e6, read_bytes_per_s=1e15)
    memory_bound = roofline_ns(problem, 1, peak_flop_per_s=1e15, read_bytes_per_s=1e6)

    assert compute_bound == pytest.approx(2e9)
    assert memory_bound == pytest.approx(1e3 * footprint_bytes(problem, 1))


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert relative_spread((100, 110, 120, 130, 140)) == pytest.approx(20 / 120)
    assert relative_spread((5,)) == 0.0
