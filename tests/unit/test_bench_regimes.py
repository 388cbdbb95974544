import ctypes

import pytest

from gemm_tuner.bench.conditions import relative_spread
from gemm_tuner.bench.correctness import _Extent, _limit_for_size, rows_to_check
from gemm_tuner.bench.drivers import SampleStruct, WeightsStruct
from gemm_tuner.bench.regimes import (
    Pushing,
    WeightCopies,
    cold_footprint_bytes,
    copies_of_weights,
    pushing_bytes,
    stride_of_copy,
    warm_up_calls,
    warm_up_ns,
)
from gemm_tuner.bench.roofline import footprint_bytes, roofline_timing
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.measurement import Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.rows import Rows

MIB = 1 << 20


@pytest.mark.parametrize(
    ("l3_mib", "cold_mib", "pushing_mib"),
    [(0, 256, 128), (32, 256, 128), (128, 1024, 512), (480, 1024, 1024), (1024, 2048, 2048)],
)
def test_cold_weights_take_no_more_than_pushes_out_a_large_cache(
    l3_mib: int, cold_mib: int, pushing_mib: int
) -> None:
    assert cold_footprint_bytes(l3_mib * MIB) == cold_mib * MIB
    assert pushing_bytes(l3_mib * MIB) == pushing_mib * MIB


def test_a_block_that_pushes_data_out_says_that_it_goes_on() -> None:
    signs: list[None] = []

    Pushing(32 * MIB, on_block=lambda: signs.append(None)).read()

    assert len(signs) == 4  # for each 32 MiB


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

    packs_each_copy = False
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


class WeightsOfAnAddress(Weights):
    """Weights that are right where they were packed alone: their bytes say the address."""

    packs_each_copy = True
    packed_weight_bytes = 1 << 20

    def pack(self, address: int) -> None:
        """Write the address."""
        ctypes.c_uint64.from_address(address).value = address


def test_each_copy_is_packed_where_its_address_matters() -> None:
    weights = WeightsOfAnAddress()
    told = []

    copies = WeightCopies(weights, 70, seed=1, on_block=lambda: told.append(1))

    for index in range(70):
        address = copies.struct.copies[index]
        assert ctypes.c_uint64.from_address(address).value == address
    assert len(told) == 3


def _kernel(mr: int) -> str:
    return f"scalar_f32_{mr}x4 mc{mr}_nc4_kc8 jc_ic_jr_ir"


def _checked(low: int, high: int, candidate: str) -> list[int]:
    return list(rows_to_check(Rows(low=low, high=high), Candidate.parse(candidate)))


def test_rows_to_check_are_two_tiles_the_ends_and_some_between() -> None:
    assert _checked(7, 7, _kernel(4)) == [7]
    assert _checked(1, 64, _kernel(1)) == [1, 2, 3, 32, 63, 64]
    assert _checked(0, 1, _kernel(8)) == [0, 1]
    assert _checked(0, 64, _kernel(4)) == [*range(9), 32, 63, 64]


def test_of_several_kernels_both_sides_of_each_boundary_are_checked() -> None:
    several = f"..10 {_kernel(1)} | ..40 {_kernel(2)} | {_kernel(4)}"

    rows = _checked(1, 100, several)

    first, second, third = {1, 2, 3, 5, 9, 10}, {*range(11, 16), 25, 39, 40}, {*range(41, 50), 70}
    assert set(rows) == first | second | third | {99, 100}
    assert _checked(10, 11, several) == [10, 11]


def test_footprint_counts_each_array_once() -> None:
    problem = Problem.create(3, 5, 7, epilogue="bias+scale+add")

    assert footprint_bytes(problem, 3) == 4 * (3 * 7 + 5 * 7 + 3 * 5 + 5 + 1 + 3 * 5)


def test_what_is_added_to_hidden_scores_need_not_be_read() -> None:
    problem = Problem.parse("attention f32 3x5x7 add+causal")

    assert footprint_bytes(problem, 3) == 4 * (3 * 7 + 2 * 5 * 7 + 3 * 7 + (3 + 4 + 5))


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


@pytest.mark.parametrize(
    ("sizes", "extent"),
    [
        ("256x4x200000", _Extent.FULL),
        ("256x4x400000", _Extent.LARGE),  # 0.8 GFLOP, but x has 410 MB
        ("2048x2048x2048", _Extent.LARGE),
        ("1x65536x8192", _Extent.FULL),
    ],
)
def test_calls_that_take_long_to_prepare_are_made_in_fewer_ways(
    sizes: str, extent: _Extent
) -> None:
    problem = Problem.parse(f"f32 {sizes} nk none")

    assert _limit_for_size(_Extent.FULL, problem, problem.m.high) is extent
    assert _limit_for_size(_Extent.TAIL, problem, problem.m.high) is _Extent.TAIL
