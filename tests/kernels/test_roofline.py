import pytest

from gemm_tuner.bench.drivers import Drivers, WeightsStruct, build_drivers, widest_vectors
from gemm_tuner.bench.roofline import PeakLoop, measure_read_bytes_per_s
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.dtype import DType
from gemm_tuner.runtime.detect import detect_cpu


@pytest.fixture(scope="module")
def drivers() -> Drivers:
    return build_drivers(find_toolchain(), detect_cpu())


@pytest.mark.parametrize("dtype", list(DType))
def test_peak_loop_counts_its_operations(drivers: Drivers, dtype: DType) -> None:
    loop = PeakLoop(drivers.roofline, dtype)

    sample = loop.sample(WeightsStruct(), warm_up_calls=1, timed_calls=3)

    lanes = {frozenset(): 4, frozenset({IsaFeature.AVX2, IsaFeature.FMA}): 8}
    vectors = widest_vectors(detect_cpu().isa)
    makes_pairs = dtype is DType.BF16 and IsaFeature.AVX512_BF16 in vectors
    terms = 2 if makes_pairs else 1
    assert loop.flop_per_call == 1000 * 12 * 2 * lanes.get(vectors, 16) * terms
    assert sample.elapsed_ns > 0


@pytest.mark.parametrize("footprint_bytes", [1, 4096, 3_000_001])
def test_reading_has_a_rate(drivers: Drivers, footprint_bytes: int) -> None:
    assert measure_read_bytes_per_s(drivers.roofline, footprint_bytes) > 1e7


@pytest.mark.parametrize(
    ("usable", "wanted"),
    [
        ({IsaFeature.FMA, IsaFeature.AVX2, IsaFeature.AVX512F}, {"avx512f", "fma"}),
        (
            {IsaFeature.FMA, IsaFeature.AVX512F, IsaFeature.AVX512_BF16},
            {"avx512f", "avx512_bf16", "fma"},
        ),
        ({IsaFeature.FMA, IsaFeature.AVX2}, {"avx2", "fma"}),
        ({IsaFeature.AVX2}, set()),
    ],
)
def test_loops_use_the_widest_vectors(usable: set[IsaFeature], wanted: set[str]) -> None:
    assert {feature.value for feature in widest_vectors(frozenset(usable))} == wanted
