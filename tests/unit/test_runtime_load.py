"""How a kernel is called: in which parts, with which memory, and after a fork."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import build_planted
from samples import make_artifact

from gemm_tuner.abi import OK, ArgsStruct, KernelLibrary, WeightsStruct
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.errors import InvalidSetting, KernelRejected
from gemm_tuner.runtime.load import Kernel

X = np.zeros((4, 2), np.float32)
W = np.zeros((3, 2), np.float32)


class _Library:
    """The interface of a kernel library that computes nothing, and notes how it is called."""

    packed_weight_bytes = 64
    pack_part_address = 0
    phases = 1
    run_address = 0  # nothing that C could call

    def __init__(self, preferred_parts: int) -> None:
        self.preferred_parts = preferred_parts
        self.calls: set[tuple[int, int]] = set()
        self.workspaces: list[int] = []

    def describe(self) -> str:
        candidate = "scalar_f32_1x1 mc4_nc3_kc2 jc_ic_jr_ir"
        return json.dumps({"problem": "f32 4x3x2", "candidate": candidate})

    def pack_weights(self, _weights: WeightsStruct, _packed_w: int) -> None:
        return

    def workspace_bytes(self, parts: int) -> int:
        return parts * 1000

    def run(self, args: ArgsStruct, _phase: int, part: int, parts: int) -> int:
        self.calls.add((part, parts))
        self.workspaces.append(args.workspace)
        return OK


def _kernel(preferred_parts: int, threads: int) -> tuple[Kernel, Any]:
    library: Any = _Library(preferred_parts)
    return Kernel(library, make_artifact(), threads), library


@pytest.mark.parametrize(
    ("preferred_parts", "kept", "asked", "parts"),
    [
        (4, 4, None, 4),
        (1, 4, None, 1),  # one part was faster than four: it was timed as one
        (4, 4, 2, 2),
        (1, 1, 3, 3),
        (4, 2, None, 2),
    ],
)
def test_a_call_uses_the_parts_that_were_timed(
    preferred_parts: int, kept: int, asked: int | None, parts: int
) -> None:
    kernel, library = _kernel(preferred_parts, kept)

    kernel(X, kernel.pack(W), threads=asked)

    assert library.calls == {(part, parts) for part in range(parts)}


@pytest.mark.parametrize("threads", [0, 1.5, "2"])
def test_no_number_of_threads_is_refused(threads: Any) -> None:  # noqa: ANN401 - users pass anything
    kernel, _library = _kernel(1, 1)

    with pytest.raises(InvalidSetting, match=f"threads = {threads!r} is out of range"):
        kernel(X, kernel.pack(W), threads=threads)


@pytest.mark.parametrize("threads", [0, 1.5, "2"])
def test_a_kernel_for_no_number_of_threads_is_refused(threads: Any) -> None:  # noqa: ANN401 - users pass anything
    kernel, _library = _kernel(1, 1)

    with pytest.raises(InvalidSetting, match=f"threads = {threads!r} is out of range"):
        Kernel(kernel.native, kernel.artifact, threads=threads)


def test_threads_may_be_a_number_of_numpy() -> None:
    kernel, library = _kernel(1, 1)
    two: Any = np.int64(2)

    kernel(X, kernel.pack(W), threads=two)

    assert library.calls == {(0, 2), (1, 2)}


def test_the_workspace_is_kept_between_calls_and_grows() -> None:
    kernel, library = _kernel(1, 1)
    packed = kernel.pack(W)

    for threads in (1, 1, 3, 1):
        kernel(X, packed, threads=threads)

    first, second, *larger = library.workspaces
    assert first == second
    assert set(larger) == {larger[0]}
    assert larger[0] % 64 == 0


_CALL_IN_A_CHILD = """
import os, signal, threading
from test_runtime_load import X, W, _kernel

kernel, library = _kernel(2, 2)
packed = kernel.pack(W)

def call():
    both = threading.Barrier(2)  # each part has a thread of its own
    library.run = lambda *_: both.wait() * 0
    kernel(X, packed)

call()
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends a child that waits for ever
    call()
    os._exit(7)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_calls_with_threads_of_its_own() -> None:
    folder = Path(__file__).parent
    paths = os.pathsep.join((str(folder), str(folder.parent)))

    completed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CALL_IN_A_CHILD],
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )

    assert completed.returncode == 7


def test_a_lack_of_descriptors_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("os.memfd_create", refuse)

    with pytest.raises(KernelRejected, match="Too many open files"):
        KernelLibrary(b"")


def test_loading_leaves_no_descriptor() -> None:
    binary = build_planted(find_toolchain()).binary
    before = _open_descriptors()

    library = KernelLibrary(binary)
    with pytest.raises(KernelRejected):
        KernelLibrary(b"not a library")

    assert library.preferred_parts == 2
    assert _open_descriptors() == before


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
