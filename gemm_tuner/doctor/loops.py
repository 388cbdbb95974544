"""The fixed loops whose times tell of a machine: arithmetic of one core, reads from memory.

They are those of the roofline where a compiler is there. Else a hash and a maximum do, which
Python and NumPy bring along.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

from gemm_tuner.domain.cpu import Cpu

_BLOCK_OVER_L3 = 4  # so that reads come from memory: see bench/regimes.py
_UNKNOWN_L3_BYTES = 32 << 20
_MOST_BYTES = 1 << 30
_MOST_OF_MEMORY = 0.25
_ROW_BYTES = 1 << 14
_HASHED_BYTES = 1 << 18  # as much as L2 has at least
_SAMPLE_NS = 1_000_000
# Times of arithmetic are of so many calls: samples of two runs compare, however many they have.
_PER = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop: `run` returns the time of one sample in ns.

    Two loops with one `identity` do the same work on CPUs of one kind.
    """

    name: str
    identity: str
    run: Callable[[], int]


def block_bytes(cpu: Cpu, available_bytes: int | None) -> int:
    """Return the size of the block that is read: beyond L3, where the memory for it is there."""
    wanted = min(_BLOCK_OVER_L3 * (cpu.caches.l3_bytes or _UNKNOWN_L3_BYTES), _MOST_BYTES)
    if available_bytes is not None:
        wanted = min(wanted, int(_MOST_OF_MEMORY * available_bytes))
    return max(_ROW_BYTES, wanted // _ROW_BYTES * _ROW_BYTES)


def plain_loops(size_bytes: int) -> tuple[Loop, Loop]:
    """Return loops that need no compiler."""
    from hashlib import sha256  # noqa: PLC0415 - as below

    import numpy as np  # noqa: PLC0415 - commands start quickly

    from gemm_tuner.machine.memory import allocate_aligned  # noqa: PLC0415

    hashed = bytes(_HASHED_BYTES)
    memory = allocate_aligned(size_bytes).view(np.uint64)
    memory[:] = 0
    times = max(1, _SAMPLE_NS // max(1, _time_ns(lambda: sha256(hashed).digest())))

    def hash_often() -> None:
        for _time in range(times):
            sha256(hashed).digest()

    def compute() -> int:
        return _time_ns(hash_often) * _PER // times

    return (
        Loop(
            name="arithmetic",
            identity=f"sha256 of {_HASHED_BYTES} bytes",
            run=compute,
        ),
        Loop(
            name="reads",
            identity=f"maximum of {size_bytes} bytes by numpy {np.__version__}",
            run=lambda: _time_ns(memory.max),
        ),
    )


def compiled_loops(cpu: Cpu, size_bytes: int) -> tuple[Loop, Loop]:
    """Return the loops of the roofline, compiled for this CPU.

    Raises:
        GemmTunerError: no compiler is there, it fails, or the cache of builds cannot be written.
    """
    from gemm_tuner.bench.drivers import build_driver, widest_vectors  # noqa: PLC0415
    from gemm_tuner.bench.regimes import WeightCopies  # noqa: PLC0415
    from gemm_tuner.bench.roofline import PeakLoop, ReadLoop  # noqa: PLC0415
    from gemm_tuner.build.toolchain import find_toolchain  # noqa: PLC0415
    from gemm_tuner.domain.dtype import DType  # noqa: PLC0415
    from gemm_tuner.domain.problem import Problem  # noqa: PLC0415

    driver = build_driver("roofline", find_toolchain(), "sample.h", isa=widest_vectors(cpu.isa))
    columns = _ROW_BYTES // DType.F32.size_bytes
    problem = Problem.create(1, size_bytes // _ROW_BYTES, columns)
    peak, read = PeakLoop(driver, DType.F32), ReadLoop(driver, problem, 1, is_plain=True)
    block = WeightCopies(read, 1, seed=0)
    first = peak.sample(block.struct, warm_up_calls=100, timed_calls=100)
    calls = max(1, 100 * _SAMPLE_NS // max(1, int(first.elapsed_ns)))

    def compute() -> int:
        sample = peak.sample(block.struct, warm_up_calls=0, timed_calls=calls)
        return int(sample.elapsed_ns) * _PER // calls

    def read_block() -> int:
        sample = read.sample(block.struct, warm_up_calls=0, timed_calls=1)
        return int(sample.elapsed_ns)

    return (
        Loop(name="arithmetic", identity=driver.name, run=compute),
        Loop(name="reads", identity=f"{size_bytes} bytes by {driver.name}", run=read_block),
    )


def compiled_clock() -> Callable[[], tuple[float, bool]]:
    """Return a loop of additions that wait for each other: its clock in Hz, if interrupted or not.

    Raises:
        GemmTunerError: no compiler is there, it fails, or the cache of builds cannot be written.
    """
    import ctypes  # noqa: PLC0415

    from gemm_tuner.bench.drivers import SampleStruct, build_driver  # noqa: PLC0415
    from gemm_tuner.build.toolchain import find_toolchain  # noqa: PLC0415

    add = ctypes.CDLL(str(build_driver("clock", find_toolchain(), "sample.h"))).clock_add
    add.restype = ctypes.c_int64
    rounds = ctypes.c_int64(_SAMPLE_NS // 8)  # 32 additions each: a millisecond at 4 GHz

    def run() -> tuple[float, bool]:
        sample = SampleStruct()
        adds = add(rounds, ctypes.byref(sample))
        return adds / max(1, sample.elapsed_ns) * 1e9, sample.involuntary_switches > 0

    return run


def _time_ns(work: Callable[[], object]) -> int:
    begin_ns = perf_counter_ns()
    work()
    return perf_counter_ns() - begin_ns
