"""The threads of the pool: who computes which part, and who sleeps."""

import os
import subprocess
import sys
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from test_cuts import RANGE, SLICED, kernel_of, normal

from gemm_tuner.errors import InvalidSetting, KernelRejected
from gemm_tuner.runtime import pool
from gemm_tuner.runtime.direct import NATIVE
from gemm_tuner.runtime.load import Kernel

needs_native = pytest.mark.skipif(
    NATIVE is None, reason="gemm_tuner.runtime._native is not built; run hatch_build.py"
)


@pytest.mark.parametrize("is_native", [True, False], ids=["in C", "in Python"])
@pytest.mark.parametrize("chosen", [RANGE, SLICED], ids=["one phase", "two phases"])
def test_the_result_depends_on_parts_and_not_on_threads(
    chosen: tuple[str, str], monkeypatch: pytest.MonkeyPatch, *, is_native: bool
) -> None:
    kernel = kernel_of(*chosen)
    x, bias = normal(40, kernel.problem.k), normal(kernel.problem.n)
    packed = kernel.pack(normal(kernel.problem.n, kernel.problem.k))
    compute = kernel if is_native else kernel.compute
    if not is_native:
        monkeypatch.setattr(pool, "NATIVE", None)

    for parts in (1, 2, 7, 8, 64):
        expected = kernel.compute(x, packed, threads=1, parts=parts, bias=bias)
        batch = kernel.batch(x[None], packed, threads=2, parts=parts, bias=bias)
        assert np.array_equal(batch[0], expected)
        for threads in (1, 2, 3):
            y = compute(x, packed, threads=threads, parts=parts, bias=bias)
            assert np.array_equal(y, expected)


@pytest.mark.parametrize("parts", [0, 1025, 2.5])
def test_no_number_of_parts_is_refused(parts: int) -> None:
    kernel = kernel_of(*RANGE)
    x, packed = normal(1, 40), kernel.pack(normal(200, 40))

    with pytest.raises(InvalidSetting, match=f"parts = {parts} is out of range"):
        kernel(x, packed, parts=parts, bias=normal(200))


def test_no_part_packs_after_one_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = kernel_of(*RANGE)
    shared = Kernel(alone.native, alone.artifact, threads=2)
    has_begun, packed = Event(), []

    def pack_weights(*_arguments: object, part: int, **_parts: int) -> None:
        if part == 0:
            assert has_begun.wait(60)
            raise KernelRejected("refused")
        has_begun.set()
        packed.append(sum(range(2_000_000)))  # goes on after the other part

    monkeypatch.setattr(pool, "NATIVE", None)
    monkeypatch.setattr(alone.native, "preferred_parts", 2)
    monkeypatch.setattr(alone.native, "pack_weights", pack_weights)
    with pytest.raises(KernelRejected, match="refused"):
        shared.pack(normal(200, 40))

    assert packed


_SLEEP = """
import os, time
from test_cuts import RANGE, kernel_of, normal
from gemm_tuner.runtime.direct import NATIVE

kernel = kernel_of(*RANGE)
x, packed, bias = normal(8, 40), kernel.pack(normal(200, 40)), normal(200)
NATIVE.configure_pool(4, None)  # as many threads as on a larger machine
before = set(os.listdir("/proc/self/task"))
kernel(x, packed, threads=4, bias=bias)
workers = sorted(set(os.listdir("/proc/self/task")) - before, key=int)
assert len(workers) == 3

def is_asleep(worker):
    with open(f"/proc/self/task/{worker}/stat") as facts:
        return facts.read().rpartition(")")[2].split()[0] == "S"

def is_idle(workers, calls):
    for _ in range(calls):
        kernel(x, packed, threads=2, bias=bias)
    return all(map(is_asleep, workers))

deadline = time.monotonic() + 20
in_a_row = 0
while in_a_row < 50 and time.monotonic() < deadline:
    in_a_row = in_a_row + 1 if is_idle(workers[1:], calls=100) else 0
print("unneeded threads sleep" if in_a_row == 50 else "unneeded threads are awake")
while not is_idle(workers, calls=0) and time.monotonic() < deadline:
    pass
print("all sleep" if is_idle(workers, calls=0) else "some are awake")
"""


@needs_native
def test_threads_that_are_not_needed_sleep_while_calls_go_on() -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])

    completed = subprocess.run(
        [sys.executable, "-c", _SLEEP],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert completed.stdout == "unneeded threads sleep\nall sleep\n", completed.stderr
