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
from gemm_tuner.bench.roofline import PeakLoop, ReadLoop
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.cpu import IsaFeature, parse_isa
from gemm_tuner.domain.dtype import DType
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu

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
    driver = build_driver("roofline", toolchain, "sample.h", isa=widest_vectors(isa))
    emulator = Emulator(build_emulator(toolchain))
    report = Report(drivers.crash)
    emulator.start(report)

    loop = PeakLoop(driver, dtype)
    emulator.stop()

    assert loop.flop_per_call == 1000 * 6 * 2 * 16 * 16 * 64 // element_bytes


def test_read_loop_reads_the_copies_in_turn_and_all_else_in_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, read = Problem.create(3, 5, 7, epilogue="bias"), []

    class Driver:
        """Takes a nanosecond a byte."""

        @staticmethod
        def roofline_read(
            _weights: "ctypes._CArgObject",
            weight_bytes: ctypes.c_int64,
            _others: ctypes.c_void_p,
            other_bytes: ctypes.c_int64,
            calls: ctypes.c_int64,
            sample: "ctypes._CArgObject",
        ) -> None:
            read.append((weight_bytes.value, other_bytes.value, calls.value))
            elapsed_ns = calls.value * (weight_bytes.value + other_bytes.value)
            sample._obj.elapsed_ns = elapsed_ns  # type: ignore[attr-defined]

        @classmethod
        def roofline_read_in_streams(
            cls, weights: "ctypes._CArgObject", *rest: "ctypes.c_int64"
        ) -> None:
            """Takes half of the time."""
            cls.roofline_read(weights, *rest)  # type: ignore[arg-type]
            rest[-1]._obj.elapsed_ns //= 2  # type: ignore[attr-defined]

    monkeypatch.setattr(ctypes, "CDLL", lambda _path: Driver)
    loop = ReadLoop(Path("unused"), problem, 3)

    sample = loop.sample(WeightsStruct(), warm_up_calls=2, timed_calls=4)

    others = 4 * (3 * 7 + 3 * 5 + 5)
    assert loop.packed_weight_bytes == 4 * 5 * 7
    assert read == [(4 * 5 * 7, others, 2), (4 * 5 * 7, others, 4), (4 * 5 * 7, others, 4)]
    assert sample.elapsed_ns == 2 * (4 * 5 * 7 + others)


@pytest.mark.parametrize("read", ["roofline_read", "roofline_read_in_streams"])
@pytest.mark.parametrize("size_bytes", [0, 64, 640, 4096])
def test_read_loop_touches_its_blocks_and_nothing_else(
    drivers: Drivers, size_bytes: int, read: str
) -> None:
    blocks = [
        GuardedMemory(name, size_bytes, flush=Flush.END, alignment_bytes=64)
        for name in ("first", "second", "others")
    ]
    for block in blocks:
        block.forbid_writing()
    copies = (ctypes.c_void_p * 2)(*(block.address for block in blocks[:2]))
    weights = WeightsStruct(copies, 2, 0)
    sample = SampleStruct()

    getattr(ctypes.CDLL(str(drivers.roofline)), read)(
        ctypes.byref(weights),
        ctypes.c_int64(size_bytes),
        ctypes.c_void_p(blocks[2].address),
        ctypes.c_int64(size_bytes),
        ctypes.c_int64(3),
        ctypes.byref(sample),
    )

    assert sample.elapsed_ns > 0
    assert weights.next == 1


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
