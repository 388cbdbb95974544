"""What is refused once is patched: the second time, it does the same without a signal."""

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
from amx_programs import ADDRESSES, KEPT, PRODUCTS, Programs, shapes
from amx_sandbox import Sandbox, open_sandbox

from gemm_tuner.bench.finding import Finding
from gemm_tuner.bench.guard import Flush, GuardedMatrix
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.record import Outcome
from gemm_tuner.machine.detect import detect_cpu

FULL = (16, 64)
# Linux, include/uapi/asm-generic/mman-common.h and mman.h: mmap.py lacks them.
_MAP_FIXED_NOREPLACE, _MAP_NORESERVE = 0x100000, 0x4000
CORRECT = Finding(outcome=Outcome.CORRECT)
pytestmark = [
    pytest.mark.isa("avx2", "fma"),
    pytest.mark.skipif(
        IsaFeature.AMX_TILE in detect_cpu().isa, reason="this CPU executes AMX by itself"
    ),
]


@pytest.fixture(
    scope="module", params=["gcc", "clang", pytest.param("zig", marks=pytest.mark.proof)]
)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return open_sandbox(request.param)


def run_and_count(
    programs: Programs, name: str, tiles: int, memory_bytes: int
) -> tuple[bytes, int]:
    """Return what a program leaves in memory, and the signals it took."""
    memory = np.random.default_rng(20_268).integers(0, 60, (4, memory_bytes), np.uint8)
    addresses = [one.ctypes.data for one in memory]
    programs.begin_to_count()
    programs.run(name, shapes(*[FULL] * tiles), *addresses)
    return memory.tobytes(), programs.end_to_count()


@pytest.mark.parametrize(
    "name", [*PRODUCTS, "copy", "copy_t1", *(f"address_{address}" for address in ADDRESSES)]
)
def test_a_program_does_the_same_without_signals(sandbox: Sandbox, name: str) -> None:
    def twice() -> None:
        first, signals = run_and_count(sandbox.programs, name, 8, 1024)
        again, more_signals = run_and_count(sandbox.programs, name, 8, 1024)
        assert signals > 0
        assert more_signals == 0
        assert again == first

    assert sandbox.run(twice, has_one_thread=True) == CORRECT


def reserve_around(address: int, reach_bytes: int) -> None:
    """Reserve all memory that is free around an address, as the arenas of many threads do."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    begin = (address - reach_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    ends = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    for used, end in [*((int(low, 16), int(high, 16)) for low, high in ends), (2**47, 2**47)]:
        size_bytes = min(used, address + reach_bytes) - begin
        if size_bytes > 0:
            libc.mmap(begin, size_bytes, 0, flags, -1, 0)  # not beside a stack, which may grow
        begin = max(begin, end)


def test_a_patch_lies_as_far_away_as_a_jump_reaches(sandbox: Sandbox) -> None:
    def twice() -> None:
        reserve_around(sandbox.programs.address_of("copy"), 3 << 29)
        _first, signals = run_and_count(sandbox.programs, "copy", 8, 1024)
        _again, more_signals = run_and_count(sandbox.programs, "copy", 8, 1024)
        assert (signals, more_signals) == (1, 0)

    assert sandbox.run(twice, has_one_thread=True) == CORRECT


@pytest.mark.isa("avx512f")
def test_a_patch_keeps_registers_flags_and_what_lies_below_the_stack(sandbox: Sandbox) -> None:
    vectors = np.random.default_rng(20_269).integers(0, 256, (32, 64), np.uint8)

    def twice() -> None:
        for _turn in range(2):
            kept, after = np.zeros(16, np.uint64), np.zeros_like(vectors)
            addresses = (one.ctypes.data for one in (kept, vectors, after))
            sandbox.programs.run("tilezero_between", shapes(*[FULL] * 8), *addresses)
            assert kept.tolist() == [*range(1, len(KEPT) + 1), 1, 101, 102, 0x5A5A, 0]
            assert np.array_equal(after, vectors)

    assert sandbox.run(twice, has_one_thread=True) == CORRECT


def test_what_is_refused_behind_a_patch_has_a_reason(sandbox: Sandbox) -> None:
    def multiply() -> None:
        sandbox.programs.run("multiply", shapes((4, 8), (4, 8), (2, 8)))
        sandbox.programs.run("multiply", shapes((4, 8), (4, 8), (3, 8)))

    finding = sandbox.run(multiply, has_one_thread=True)

    assert finding.outcome is Outcome.CRASHED
    assert finding.detail.startswith("tdpbssd was refused: the first factor has rows of another")


def test_a_patch_meets_guard_pages(sandbox: Sandbox) -> None:
    source = GuardedMatrix("source", (16, 64), np.dtype(np.uint8), padding=0, flush=Flush.END)
    source.set_input(np.ones(FULL, np.uint8))
    target, unused = np.zeros(1024, np.uint8), np.zeros(64, np.uint8).ctypes.data

    def copy() -> None:
        for offset in (0, 1):
            addresses = (source.address + offset, target.ctypes.data, unused, unused)
            sandbox.programs.run("copy", shapes(*[FULL] * 8), *addresses)

    finding = sandbox.run(copy, source, has_one_thread=True)

    assert finding.outcome is Outcome.OUT_OF_BOUNDS
    assert "the guard page after source" in finding.detail


def test_code_is_put_back(sandbox: Sandbox) -> None:
    unused = np.zeros((4, 64), np.uint8)

    def release() -> None:
        before = sandbox.programs.code_of("release")
        addresses = [one.ctypes.data for one in unused]
        sandbox.programs.run("release", shapes(FULL), *addresses)
        assert sandbox.programs.code_of("release") != before
        sandbox.emulator.stop()
        assert sandbox.programs.code_of("release") == before

    assert sandbox.run(release, has_one_thread=True) == CORRECT
