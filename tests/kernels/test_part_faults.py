"""What becomes of a call whose parts, cores or processes are not as planned."""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from test_cuts import RANGE, SLICED, kernel_of, normal

from gemm_tuner.abi import OK, ArgsStruct, ArrayView, make_args
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.machine.memory import address_of
from gemm_tuner.runtime.direct import NATIVE
from gemm_tuner.runtime.load import Kernel

M = 40
PARTS = 8

both_phases = pytest.mark.parametrize("chosen", [RANGE, SLICED], ids=["one phase", "two phases"])
needs_pool = pytest.mark.skipif(
    NATIVE is None or usable_cpus() < 2, reason="there is no pool of two threads"
)


class Call:
    """A call in parts, all of whose memory can be shared with another process."""

    def __init__(self, chosen: tuple[str, str]) -> None:
        self.kernel: Kernel = kernel_of(*chosen)
        problem, native = self.kernel.problem, self.kernel.native
        x, w, bias = normal(M, problem.k), normal(problem.n, problem.k), normal(problem.n)
        self.right = self.kernel.compute(x, self.kernel.pack(w), threads=PARTS, bias=bias)
        packed = self.kernel.pack(w).memory
        self._arrays = [_shared(one) for one in (x, packed, bias)]
        self.y = _shared(np.full((M, problem.n), np.nan, np.float32))
        self._workspace = _shared(np.zeros(native.workspace_bytes(PARTS) + 64, np.uint8))

    def args(self) -> ArgsStruct:
        problem = self.kernel.problem
        x, packed, bias = map(address_of, self._arrays)
        return make_args(
            m=M,
            x=ArrayView(x, problem.k),
            packed_w=packed,
            y=ArrayView(address_of(self.y), problem.n),
            operands=[ArrayView(bias, 0)],
            workspace=address_of(self._workspace),
        )

    def run(self, phase: int, *parts: int) -> None:
        for part in parts:
            assert self.kernel.native.run(self.args(), phase, part, PARTS) == OK


def _shared(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return a copy in pages that a forked child shares."""
    pages = mmap.mmap(-1, max(1, array.nbytes))
    copy = np.frombuffer(pages, array.dtype, array.size).reshape(array.shape)
    copy[...] = array
    return copy


def test_a_part_that_is_never_run_leaves_its_piece_of_y() -> None:
    call = Call(RANGE)

    call.run(0, *range(1, PARTS))

    is_left = np.isnan(call.y)
    assert 0 < is_left.sum() <= 2 * call.y.size / PARTS
    np.testing.assert_array_equal(call.y[~is_left], call.right[~is_left])


@both_phases
def test_a_part_that_is_run_again_writes_the_same(chosen: tuple[str, str]) -> None:
    call = Call(chosen)

    for phase in range(call.kernel.native.phases):
        call.run(phase, *range(PARTS), *reversed(range(PARTS)), 3)

    np.testing.assert_array_equal(call.y, call.right)


@both_phases
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_parts_may_be_run_by_another_process(chosen: tuple[str, str]) -> None:
    call = Call(chosen)

    for phase in range(call.kernel.native.phases):
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # ends a child that waits for ever
            call.run(phase, *range(1, PARTS, 2))
            os._exit(7)
        call.run(phase, *range(0, PARTS, 2))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    np.testing.assert_array_equal(call.y, call.right)


_CALL_UNDER = """
import os, sys
import numpy as np
from test_cuts import RANGE, SLICED, kernel_of, normal

calls = []
for kernel in (kernel_of(*RANGE), kernel_of(*SLICED)):
    problem = kernel.problem
    given = normal(40, problem.k), kernel.pack(normal(problem.n, problem.k))
    bias = normal(problem.n)
    for parts in (2, 7, 128):
        right = kernel.compute(*given, threads=1, parts=parts, bias=bias)
        calls.append((kernel, given, parts, bias, right))

def check():
    for kernel, given, parts, bias, right in calls:
        for _ in range(50):
            y = kernel(*given, threads=2, parts=parts, bias=bias)
            assert np.array_equal(y, right), parts

check()
{condition}
check()
print("right")
"""

_ONE_CPU = """
cpu = min(os.sched_getaffinity(0))
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {cpu})
"""


def _call_under(condition: str) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    completed = subprocess.run(
        [sys.executable, "-c", _CALL_UNDER.format(condition=condition)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (completed.returncode, completed.stdout) == (0, "right\n"), completed.stderr


@needs_pool
def test_threads_that_come_to_share_one_cpu_compute_the_same() -> None:
    _call_under(_ONE_CPU)


@pytest.fixture
def half_a_cpu() -> Iterator[Path]:
    """Make a control group with half a CPU, of either version."""
    groups = Path("/sys/fs/cgroup")
    for root, limits in (
        (groups / "cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}),
        (groups, {"cpu.max": "50000 100000"}),
    ):
        if not (root / "cgroup.procs").exists():
            continue
        group = root / f"gemm-tuner-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for name, limit in limits.items():
                (group / name).write_text(limit)
        except OSError:
            group.rmdir()
            continue
        yield group
        with suppress(OSError):
            group.rmdir()
        return
    pytest.skip("no control group can be made here that limits CPU time")


@needs_pool
def test_threads_that_come_to_share_half_a_cpu_compute_the_same(half_a_cpu: Path) -> None:
    _call_under(f'open("{half_a_cpu}/cgroup.procs", "w").write(str(os.getpid()))')
