import ctypes
from pathlib import Path

import pytest

from gemm_tuner.bench.crash import Report
from gemm_tuner.bench.drivers import (
    Drivers,
    SampleStruct,
    WeightsStruct,
    build_driver,
    build_drivers,
    widest_vectors,
)
from gemm_tuner.bench.emulator import Emulator, build_emulator
from gemm_tuner.bench.guard import Flush, GuardedMemory
from gemm_tuner.bench.roofline import PeakLoop, measure_read_bytes_per_s
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.cpu import IsaFeature, parse_isa
from gemm_tuner.domain.dtype import DType
from gemm_tuner.runtime.detect import detect_cpu

# How many products an instruction adds in each lane, and in how many independent chains.
_OF_BYTES = ({IsaFeature.AVX512_VNNI, IsaFeature.AVX_VNNI}, 4, 12)
AMX = parse_isa(("amx_tile", "amx_bf16", "amx_int8"))
TERMS: dict[DType, tuple[set[IsaFeature], int, int]] = {
    DType.BF16: ({IsaFeature.AVX512_BF16}, 2, 16),
    DType.S8: _OF_BYTES,
    DType.U8: _OF_BYTES,
}


@pytest.fixture(scope="module")
def drivers() -> Drivers:
    return build_drivers(find_toolchain(), detect_cpu())


@pytest.mark.parametrize("dtype", list(DType))
def test_peak_loop_counts_its_operations(drivers: Drivers, dtype: DType) -> None:
    loop = PeakLoop(drivers.roofline, dtype)

    sample = loop.sample(WeightsStruct(), warm_up_calls=1, timed_calls=3)

    lanes = {frozenset(): 4, frozenset({IsaFeature.AVX2, IsaFeature.FMA}): 8}
    vectors = widest_vectors(detect_cpu().isa)
    if AMX & vectors and dtype in TERMS:
        pytest.skip("this CPU has AMX: its products are not those of vectors")
    instructions, terms, chains = TERMS.get(dtype, (set(), 1, 12))
    if not instructions & vectors:
        terms, chains = 1, 12
    assert loop.flop_per_call == 1000 * chains * 2 * lanes.get(vectors, 16) * terms
    assert sample.elapsed_ns > 0


@pytest.mark.parametrize(("dtype", "element_bytes"), [(DType.BF16, 2), (DType.U8, 1)])
def test_peak_loop_of_tiles_counts_its_operations(
    drivers: Drivers, dtype: DType, element_bytes: int
) -> None:
    toolchain, isa = find_toolchain(), detect_cpu().isa | AMX
    if IsaFeature.AVX512F not in isa or AMX & detect_cpu().isa:
        pytest.skip("needs AVX-512 without AMX, to emulate it")
    driver = build_driver("roofline", toolchain, "bench/sample.h", isa=widest_vectors(isa))
    emulator = Emulator(build_emulator(toolchain))
    report = Report(drivers.crash)
    emulator.start(report)

    loop = PeakLoop(driver, dtype)
    emulator.stop()

    assert loop.flop_per_call == 1000 * 6 * 2 * 16 * 16 * 64 // element_bytes


@pytest.mark.parametrize(("footprint_bytes", "read_bytes"), [(1, 512), (4096, 4096), (1300, 1024)])
def test_rate_is_that_of_the_bytes_that_were_read(
    monkeypatch: pytest.MonkeyPatch, footprint_bytes: int, read_bytes: int
) -> None:
    blocks = []

    class Driver:
        """Reads one byte in each nanosecond."""

        @staticmethod
        def roofline_read(
            _memory: ctypes.c_void_p,
            size_bytes: ctypes.c_int64,
            rounds: ctypes.c_int64,
            sample: "ctypes._CArgObject",
        ) -> None:
            blocks.append(size_bytes.value)
            sample._obj.elapsed_ns = size_bytes.value * rounds.value  # type: ignore[attr-defined]

    monkeypatch.setattr(ctypes, "CDLL", lambda _path: Driver)

    assert measure_read_bytes_per_s(Path("unused"), footprint_bytes) == pytest.approx(1e9)
    assert set(blocks) == {read_bytes}


def test_read_loop_touches_its_block_and_nothing_else(drivers: Drivers) -> None:
    block = GuardedMemory("block", 4096, flush=Flush.END, alignment_bytes=64)
    block.forbid_writing()
    sample = SampleStruct()

    ctypes.CDLL(str(drivers.roofline)).roofline_read(
        ctypes.c_void_p(block.address),
        ctypes.c_int64(4096),
        ctypes.c_int64(3),
        ctypes.byref(sample),
    )

    assert sample.elapsed_ns > 0


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
