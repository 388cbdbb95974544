"""What is refused once is patched: the second time, it does the same without a signal."""

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
