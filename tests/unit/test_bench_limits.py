"""What the times of a plausible measurement lie between."""

import pytest

from gemm_tuner.bench.limits import generous_epilogue_ns, least_arithmetic_ns, least_reading_ns
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem

AVX512 = frozenset({IsaFeature.AVX512F})
VNNI = AVX512 | {IsaFeature.AVX512_VNNI}


@pytest.mark.parametrize(
    ("problem", "isa", "least_ns"),
    [
        ("f32 8x16x32 nk none", AVX512, 800.0),
        ("u8_s8_s32_f32 8x16x32 nk none", VNNI, 800.0),
        # Some instruction does more than that of the loop.
        ("u8_s8_s32_f32 8x16x32 nk none", AVX512, 200.0),
        ("f16 8x16x32 nk none", AVX512, 400.0),
        ("f32_s8_f32_f32 8x16x32 nk:g32 none", VNNI, 200.0),
    ],
)
def test_arithmetic_has_a_margin_for_faster_instructions(
    problem: str, isa: frozenset[IsaFeature], least_ns: float
) -> None:
    assert least_arithmetic_ns(Problem.parse(problem), 1000.0, isa) == pytest.approx(least_ns)


def test_reading_has_a_margin_for_streams_and_for_the_caches_of_threads() -> None:
    assert least_reading_ns(1000.0, threads=1) == pytest.approx(480.0)
    assert least_reading_ns(1000.0, threads=2) == pytest.approx(105.0)
    assert least_reading_ns(10.0, threads=1) == 0.0


def test_an_epilogue_takes_time_for_each_element_and_what_it_reads() -> None:
    plain = Problem.parse("f32 8x16x32 nk none")
    scaled = Problem.parse("f32 8x16x32 nk relu")
    curved = Problem.parse("f32 8x16x32 nk gelu_erf")
    added = Problem.parse("f32 8x16x32 nk add")
    elements = 8 * 16

    through_memory_ns = generous_epilogue_ns(plain, 8)
    assert through_memory_ns == pytest.approx(2 * 4 * elements / 4)
    assert generous_epilogue_ns(scaled, 8) == pytest.approx(through_memory_ns + elements)
    assert generous_epilogue_ns(curved, 8) == pytest.approx(through_memory_ns + 10 * elements)
    assert generous_epilogue_ns(added, 8) == pytest.approx(through_memory_ns + 2 * elements)
