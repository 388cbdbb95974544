import ctypes

import pytest

from gemm_tuner.bench.conditions import relative_spread
from gemm_tuner.bench.correctness import rows_to_check
from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct
from gemm_tuner.bench.regimes import (
    WeightCopies,
    copies_of_weights,
    stride_of_copy,
    warm_up_calls,
    warm_up_ns,
)
from gemm_tuner.bench.roofline import footprint_bytes, roofline_timing
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.measurement import Timing
from gemm_tuner.domain.problem import Problem, Rows

MIB = 1 << 20


@pytest.mark.parametrize("packed_bytes", [4, 64, 65, MIB, 60 * MIB, 700 * MIB])
def test_cold_copies_fill_the_last_level_cache_eight_times(packed_bytes: int) -> None:
    copies = copies_of_weights(Regime.COLD_WEIGHTS, packed_bytes, 32 * MIB)

    taken_bytes = copies * stride_of_copy(packed_bytes)
    assert copies >= 2
    assert 256 * MIB <= taken_bytes <= max(256 * MIB, stride_of_copy(packed_bytes)) * 2


def test_tiny_cold_weights_take_no_more_memory_than_others() -> None:
    copies = copies_of_weights(Regime.COLD_WEIGHTS, 4, 32 * MIB)

    assert copies * stride_of_copy(4) == 256 * MIB


@pytest.mark.parametrize(
    ("candidates", "sample_ns", "copies"),
    [(1, 2_000_000, 256), (2, 400_000, 128), (8, 400_000, 64), (4, 2_000_000, 123)],
)
def test_candidates_share_the_cold_weights_but_read_none_twice_in_a_sample(
    candidates: int, sample_ns: int, copies: int
) -> None:
    found = copies_of_weights(
        Regime.COLD_WEIGHTS, MIB, 32 * MIB, candidates=candidates, sample_ns=sample_ns
    )

    assert found == copies


@pytest.mark.parametrize("packed_bytes", [0, MIB])
def test_hot_weights_are_one_copy(packed_bytes: int) -> None:
    assert copies_of_weights(Regime.HOT, packed_bytes, 32 * MIB) == 1


def test_only_what_is_about_as_large_as_l3_settles_slowly() -> None:
    sizes = (MIB, 32 * MIB, 64 * MIB, 256 * MIB)

    hot = [warm_up_ns(Regime.HOT, size, 32 * MIB) > 0 for size in sizes]
    cold = [warm_up_ns(Regime.COLD_WEIGHTS, size, 32 * MIB) for size in sizes]

    assert hot == [False, True, True, False]
    assert cold == [0, 0, 0, 0]


def test_hot_weights_settle_where_candidates_push_them_out() -> None:
    sizes = (MIB, 17 * MIB, 256 * MIB)

    assert [warm_up_calls(Regime.HOT, size, 32 * MIB) for size in sizes] == [1, 4, 4]
    assert [warm_up_calls(Regime.COLD_WEIGHTS, size, 32 * MIB) for size in sizes] == [1, 1, 1]


def test_copies_start_at_cache_lines() -> None:
    assert [stride_of_copy(size) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]


class Weights:
    """Stands for a runner: its packed weights are one repeated byte."""

    packed_weight_bytes = 100 << 20

    def pack(self, address: int) -> None:
        """Write the byte."""
        ctypes.memset(address, 7, self.packed_weight_bytes)

    def sample(
        self, _weights: WeightsStruct, *, warm_up_calls: int, timed_calls: int
    ) -> SampleStruct:
        """Not called."""
        raise NotImplementedError


def test_every_copy_has_the_packed_weights_and_progress_is_told() -> None:
    weights = Weights()
    told = []

    copies = WeightCopies(weights, 4, seed=1, on_block=lambda: told.append(1))

    struct = copies.struct
    last = weights.packed_weight_bytes - 1
    assert struct.count == 4
    assert len({struct.copies[index] for index in range(4)}) == 4
    for index in range(4):
        assert ctypes.c_uint8.from_address(struct.copies[index] + last).value == 7
    assert len(told) == 3


def test_rows_to_check_are_two_tiles_the_ends_and_some_between() -> None:
    assert list(rows_to_check(Rows(low=7, high=7), 4)) == [7]
    assert list(rows_to_check(Rows(low=1, high=64), 1)) == [1, 2, 3, 32, 63, 64]
    assert list(rows_to_check(Rows(low=0, high=1), 8)) == [0, 1]
    assert list(rows_to_check(Rows(low=0, high=64), 4)) == [*range(9), 32, 63, 64]


def test_footprint_counts_each_array_once() -> None:
    problem = Problem.create(3, 5, 7, epilogue="bias+scale+add")

    assert footprint_bytes(problem, 3) == 4 * (3 * 7 + 5 * 7 + 3 * 5 + 5 + 1 + 3 * 5)


@pytest.mark.parametrize(
    ("read_ns", "cores", "least_ns"),
    [
        (1_000_000, 1, (2e6, 4e6, 6e6)),
        (5_000_000, 1, (5e6, 5e6, 5e6)),
        (5_000_000, 2, (2.5e6, 2.5e6, 2.5e6)),
    ],
)
def test_roofline_is_in_each_round_what_the_longer_of_arithmetic_and_reading_took(
    read_ns: int, cores: int, least_ns: tuple[float, ...]
) -> None:
    problem = Problem.create(1, 1000, 1000)
    peak = Timing(calls_per_sample=2, samples_ns=(200, 400, 600))
    read = Timing(calls_per_sample=3, samples_ns=(3 * read_ns,) * 3)

    found = roofline_timing(problem, 1, peak=peak, flop_per_peak_call=100, read=read, cores=cores)

    each_ns = [sample_ns / found.calls_per_sample for sample_ns in found.samples_ns]
    assert each_ns == pytest.approx(least_ns)


def test_roofline_of_a_call_of_few_ns_is_not_rounded_to_whole_ones() -> None:
    problem = Problem.create(1, 1, 3)
    peak = Timing(calls_per_sample=1, samples_ns=(50,))
    read = Timing(calls_per_sample=100, samples_ns=(50,))

    found = roofline_timing(problem, 1, peak=peak, flop_per_peak_call=200, read=read, cores=1)

    assert found.median_ns == pytest.approx(1.5)


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    assert relative_spread((100, 110, 120, 130, 140)) == pytest.approx(20 / 120)
    assert relative_spread((5,)) == 0.0
