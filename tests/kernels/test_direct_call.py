"""Calls that go straight from Python's arguments to the kernel, in C, and those that must not."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, Never

import numpy as np
import pytest
from grids import grid_toolchain
from numpy.typing import NDArray

from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import GemmTunerError, InvalidArray, InvalidSetting
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.direct import NATIVE
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.space.catalog import family_named

needs_native = pytest.mark.skipif(
    NATIVE is None, reason="gemm_tuner.runtime._native is not built; run hatch_build.py"
)

M, N, K = 6, 20, 9
EPILOGUE = "scale+bias+add+relu"
RNG = np.random.default_rng(20_261)


def _refuse(*_arguments: object, **_named: object) -> Never:
    """Stand for `compute` in a kernel that is only to be called directly."""
    raise AssertionError("the call was not direct.")


def _load(problem: str, candidate: str, *, threads: int = 1, direct_only: bool = False) -> Kernel:
    parsed = Candidate.parse(candidate)
    family = family_named(parsed.micro_kernel.family)
    source = render(Problem.parse(problem), parsed, family)
    build = compile_kernel(source, isa=family.isa, toolchain=grid_toolchain(as_served=False))
    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu(), threads=threads)
    if direct_only:
        vars(kernel)["compute"] = _refuse
    return kernel


def _kernel(*, direct_only: bool = False, threads: int = 1) -> Kernel:
    return _load(
        f"f32 {M}x{N}x{K} nk {EPILOGUE}",
        f"scalar_f32_2x2 mc{M}_nc{N}_kc{K} jc_ic_jr_ir pack_x grid2x1",
        direct_only=direct_only,
        threads=threads,
    )


def _random(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape, np.float32)


def _arguments() -> dict[str, Any]:
    return {"scale": 0.5, "bias": _random(N), "add": _random(M, N)}


@needs_native
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize(
    ("threads", "parts"),
    [(None, None), (1, None), (2, None), (3, None), (9, None), (None, 3), (1, 2), (2, 5)],
)
def test_a_direct_call_computes_what_a_checked_one_does(
    *, with_out: bool, threads: int | None, parts: int | None
) -> None:
    direct, checked = _kernel(direct_only=True), _kernel()
    x, packed, operands = _random(M, K), checked.pack(_random(N, K)), _arguments()
    out = np.full((M, N + 3), np.nan, np.float32)[:, :N] if with_out else None

    y = direct(x, packed, out=out, threads=threads, parts=parts, **operands)

    assert (y is out) == with_out
    expected = checked.compute(x, packed, threads=threads, parts=parts, **operands)
    assert np.array_equal(y, expected)


@needs_native
def test_rows_at_any_distance_are_taken_directly() -> None:
    direct, checked = _kernel(direct_only=True), _kernel()
    wide_x, wide_out, wide_add = _random(M, 2 * K), _random(M, 2 * N), _random(2 * M, N)
    x, out, add = wide_x[:, 3 : 3 + K], wide_out[:, 1 : 1 + N], wide_add[::2]
    operands = {**_arguments(), "add": add}
    packed = checked.pack(_random(N, K))
    beside = wide_out[:, N + 1 :].copy()

    direct(x, packed, out=out, **operands)

    assert np.array_equal(out, checked.compute(x, packed, **operands))
    assert np.array_equal(wide_out[:, N + 1 :], beside)


@needs_native
@pytest.mark.parametrize(
    ("types", "candidate"),
    [
        ("bf16", "scalar_bf16_2x2"),
        ("bf16_bf16_f32_f32", "scalar_bf16_2x2"),
        ("f16", "scalar_f16_2x2"),
    ],
)
def test_numbers_of_16_bits_are_taken_directly(types: str, candidate: str) -> None:
    problem = f"{types} {M}x{N}x{K} nk bias"
    text = f"{candidate} mc{M}_nc{N}_kc{K} jc_ic_jr_ir"
    direct, checked = _load(problem, text, direct_only=True), _load(problem, text)
    x_type, y_type = (
        NUMPY_TYPES[dtype] for dtype in (checked.problem.types.x, checked.problem.types.y)
    )
    x, bias = _random(M, K).astype(x_type), _random(N).astype(y_type)
    packed = checked.pack(_random(N, K).astype(x_type))

    y = direct(x, packed, bias=bias)

    assert y.dtype == y_type
    assert y.tobytes() == checked.compute(x, packed, bias=bias).tobytes()


@needs_native
@pytest.mark.parametrize("types", ["u8_s8_s32_f32", "s8_s8_s32_bf16", "s8_s8_s32_s8"])
def test_bytes_and_their_scales_are_taken_directly(types: str) -> None:
    problem = f"{types} {M}x{N}x{K} nk x_row_zero_point+channel_scale+scale"
    text = f"scalar_int8_2x2 mc{M}_nc{N}_kc{K} jc_ic_jr_ir"
    direct, checked = _load(problem, text, direct_only=True), _load(problem, text)
    x = RNG.integers(0, 100, (M, K)).astype(np.uint8 if types[0] == "u" else np.int8)
    packed = checked.pack(RNG.integers(-100, 100, (N, K)).astype(np.int8))
    operands: dict[str, Any] = {
        "x_row_zero_point": np.arange(M, dtype=np.int32),
        "channel_scale": RNG.random(N, np.float32),
        "scale": np.array([0.01], np.float32),
    }

    y = direct(x, packed, **operands)

    assert y.dtype == NUMPY_TYPES[checked.problem.types.y]
    assert y.tobytes() == checked.compute(x, packed, **operands).tobytes()


@needs_native
@pytest.mark.parametrize("offset", [3, -(2**31), np.array([7], np.int32)])
def test_offsets_are_taken_directly(offset: object) -> None:
    problem = f"u8_s8_s32_s32 {M}x{N}x{K} nk x_zero_point"
    text = f"scalar_int8_2x2 mc{M}_nc{N}_kc{K} jc_ic_jr_ir"
    direct, checked = _load(problem, text, direct_only=True), _load(problem, text)
    x = RNG.integers(0, 100, (M, K)).astype(np.uint8)
    packed = checked.pack(RNG.integers(-100, 100, (N, K)).astype(np.int8))

    y = direct(x, packed, x_zero_point=offset)

    assert np.array_equal(y, checked.compute(x, packed, x_zero_point=offset))


@pytest.mark.parametrize("offset", [2**31, 2**70, 1.5, np.array([1.0], np.float32)])
def test_offsets_that_are_no_int32_are_told(offset: object) -> None:
    problem = f"u8_s8_s32_s32 {M}x{N}x{K} nk x_zero_point"
    kernel = _load(problem, f"scalar_int8_2x2 mc{M}_nc{N}_kc{K} jc_ic_jr_ir")
    x, w = np.zeros((M, K), np.uint8), np.zeros((N, K), np.int8)

    with pytest.raises(InvalidArray, match="x_zero_point"):
        kernel(x, kernel.pack(w), x_zero_point=offset)


@needs_native
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_any_number_of_rows_in_the_range_is_taken_directly(rows: int) -> None:
    problem, text = "f32 0..5x3x2 nk none", "scalar_f32_1x1 mc5_nc3_kc2 jc_ic_jr_ir"
    direct = _load(problem, text, direct_only=True)
    x, w = _random(rows, 2), _random(3, 2)

    y = direct(x, direct.pack(w))

    assert y.shape == (rows, 3)
    np.testing.assert_allclose(y, x @ w.T, rtol=1e-5, atol=1e-6)


def _misaligned() -> NDArray[np.float32]:
    raw = np.zeros(M * K * 4 + 1, np.uint8)
    return raw[1:].view(np.float32).reshape(M, K)


def _read_only() -> NDArray[np.float32]:
    out = np.zeros((M, N), np.float32)
    out.flags.writeable = False
    return out


# fmt: off
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [[1.0]]},                                InvalidArray, "two dimensions"),
    ({"x": np.zeros(K, np.float32)},                InvalidArray, "two dimensions"),
    ({"x": np.zeros((M, K, 1), np.float32)},        InvalidArray, "two dimensions"),
    ({"x": np.zeros((M + 1, K), np.float32)},       InvalidArray, "7 rows"),
    ({"x": np.zeros((M, K + 1), np.float32)},       InvalidArray, "x has the shape"),
    ({"x": np.zeros((M, K))},                       InvalidArray, "float64"),
    ({"x": np.zeros((M, K), ">f4")},                InvalidArray, "dtype >f4"),
    ({"x": np.zeros((K, M), np.float32).T},         InvalidArray, "contiguous"),
    ({"x": np.zeros((M, 2 * K), np.float32)[:, ::2]}, InvalidArray, "8 bytes apart"),
    ({"x": np.zeros((M, K), np.float32)[::-1]},     InvalidArray, "-36 bytes apart"),
    ({"x": np.broadcast_to(np.float32(1), (M, K))}, InvalidArray, "0 bytes apart"),
    ({"x": _misaligned()},                          InvalidArray, "multiple of 4"),
    ({"out": np.zeros((M, N))},                     InvalidArray, "out has the dtype"),
    ({"out": np.zeros((N, M), np.float32)},         InvalidArray, "out has the shape"),
    ({"out": _read_only()},                         InvalidArray, "read-only"),
    ({"out": "out"},                                InvalidArray, "out is a str"),
    ({"bias": np.zeros(N + 1, np.float32)},         InvalidArray, "bias has the shape"),
    ({"bias": np.zeros(2 * N, np.float32)[::2]},    InvalidArray, "8 bytes apart"),
    ({"bias": np.zeros(N, np.int32)},               InvalidArray, "bias has the dtype"),
    ({"add": np.zeros((N, M), np.float32).T},       InvalidArray, "add has elements"),
    ({"scale": "half"},                             InvalidArray, "one number"),
    ({"other": 1.0},                                InvalidArray, "other"),
    ({"threads": 0},                                InvalidSetting, "threads = 0"),
    ({"threads": 1025},                             InvalidSetting, "threads = 1025"),
    ({"threads": 2**70},                            InvalidSetting, "threads"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "error", "reason"), WRONG)
def test_wrong_arguments_are_told(
    changes: dict[str, Any], error: type[GemmTunerError], reason: str
) -> None:
    kernel = _kernel()
    named = {**_arguments(), **changes}
    x = named.pop("x", _random(M, K))

    with pytest.raises(error, match=reason):
        kernel(x, kernel.pack(_random(N, K)), **named)


@pytest.mark.parametrize("name", ["x", "add"])
def test_overlapping_output_is_told(name: str) -> None:
    square = 9
    kernel = _load(f"f32 {square}x9x9 nk add", "scalar_f32_1x1 mc9_nc9_kc9 jc_ic_jr_ir")
    both = np.zeros((square + 1, 9), np.float32)
    arrays = {"x": _random(square, 9), "add": _random(square, 9), name: both[:-1]}

    with pytest.raises(InvalidArray, match=f"out overlaps {name}"):
        kernel(arrays["x"], kernel.pack(_random(9, 9)), out=both[1:], add=arrays["add"])


def test_wrong_calls_are_told() -> None:
    kernel = _kernel()
    x, packed = _random(M, K), kernel.pack(_random(N, K))

    with pytest.raises(TypeError):
        kernel(x)  # type: ignore[call-arg]  # what is tested
    with pytest.raises(InvalidArray, match="has no values"):
        kernel(x, packed, x)
    with pytest.raises(InvalidArray, match="reads scale, bias, add, but got none"):
        kernel(x, packed)
    with pytest.raises(InvalidArray, match="packed has the layout 'another'"):
        kernel(x, packed._replace(owner="another"), **_arguments())
    with pytest.raises(InvalidArray, match="is a tuple, not packed weights"):
        kernel(x, tuple(packed), **_arguments())  # type: ignore[arg-type]  # what is tested
    with pytest.raises(InvalidArray, match="not packed weights"):
        kernel(x, x, **_arguments())


@needs_native
def test_a_kernel_is_prepared_once() -> None:
    kernel = _kernel()

    with pytest.raises(RuntimeError, match="once"):
        kernel._prepare()


def test_calls_leave_no_reference_behind() -> None:
    kernel = _kernel(threads=2)
    packed, operands = kernel.pack(_random(N, K)), _arguments()
    x, out = _random(M, K), np.zeros((M, N), np.float32)
    wrong = np.zeros((M, K))
    held = [x, out, packed, packed.memory, wrong, operands["bias"], operands["add"], np.float32]
    before = [sys.getrefcount(one) for one in held]

    for _ in range(50):
        kernel(x, packed, out=out, **operands)
        kernel(x, packed, **operands)
        with pytest.raises(InvalidArray):
            kernel(wrong, packed, **operands)
    gc.collect()

    assert [sys.getrefcount(one) for one in held] == before


@needs_native
def test_many_calls_leave_no_memory_behind() -> None:
    kernel = _kernel(threads=2)
    packed, operands, x = kernel.pack(_random(N, K)), _arguments(), _random(M, K)

    def call(times: int) -> int:
        for _ in range(times):
            kernel(x, packed, **operands)
        return _resident_bytes()

    before = call(1000)

    assert call(100_000) - before < 1 << 20


def test_a_kernel_and_its_results_are_freed() -> None:
    kernel = _kernel()
    y = kernel(_random(M, K), kernel.pack(_random(N, K)), **_arguments())
    references = [weakref.ref(kernel), weakref.ref(y)]

    del kernel, y
    gc.collect()

    assert [reference() for reference in references] == [None, None]


@needs_native
def test_kernels_leave_no_reference_to_types_behind() -> None:
    _kernel()
    gc.collect()
    before = sys.getrefcount(np.dtype(np.float32))

    for _ in range(20):
        _kernel()
    gc.collect()

    assert sys.getrefcount(np.dtype(np.float32)) - before < 20


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_of_python_call_one_kernel_at_the_same_time(threads: int) -> None:
    kernel = _kernel()
    packed, operands = kernel.pack(_random(N, K)), _arguments()
    inputs = [_random(M, K) for _ in range(8)]
    expected = [kernel.compute(x, packed, threads=threads, **operands) for x in inputs]

    def call(x: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return [kernel(x, packed, threads=threads, **operands) for _ in range(300)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, inputs))

    for results, right in zip(found, expected, strict=True):
        assert all(np.array_equal(result, right) for result in results)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_calls_in_several_threads() -> None:
    kernel = _kernel()
    x, packed, operands = _random(M, K), kernel.pack(_random(N, K)), _arguments()
    before = kernel(x, packed, threads=4, **operands)

    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that waits for ever
        same = all(
            np.array_equal(kernel(x, packed, threads=4, **operands), before) for _ in range(100)
        )
        os._exit(7 if same else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert np.array_equal(kernel(x, packed, threads=4, **operands), before)


_CALL_AND_LEAVE = """
import sys
{prelude}
from test_direct_call import M, N, K, NATIVE, _arguments, _kernel, _random

assert (NATIVE is None) == {is_missing}
kernel = _kernel()
packed = kernel.pack(_random(N, K))
for _ in range(3):
    kernel(_random(M, K), packed, threads=2, **_arguments())
print("left")
"""


def _run_python(program: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_native
def test_a_program_ends_while_threads_of_the_pool_wait() -> None:
    completed = _run_python(_CALL_AND_LEAVE.format(prelude="", is_missing=False))

    assert (completed.returncode, completed.stdout) == (0, "left\n"), completed.stderr


def test_without_the_extension_kernels_are_called_through_ctypes() -> None:
    prelude = 'sys.modules["gemm_tuner.runtime._native"] = None'

    completed = _run_python(_CALL_AND_LEAVE.format(prelude=prelude, is_missing=True))

    assert (completed.returncode, completed.stdout) == (0, "left\n"), completed.stderr


_COUNT_PINNED_THREADS = """
import os, time

def count_pinned():
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    return sum(len(os.sched_getaffinity(thread)) == 1 for thread in threads)

deadline = time.monotonic() + 20  # a thread pins itself when it first runs
while count_pinned() < {pinned} and time.monotonic() < deadline:
    os.sched_yield()
print(count_pinned())
"""


@needs_native
@pytest.mark.skipif(usable_cpus() < 2, reason="one CPU is usable: the pool has no threads")
@pytest.mark.parametrize(("choice", "pinned"), [("", 0), ("0", 0), ("1", 1)])
def test_threads_are_pinned_on_request(choice: str, pinned: int) -> None:
    prelude = f"import os; os.environ['GEMM_TUNER_PIN'] = {choice!r}"
    program = _CALL_AND_LEAVE.format(prelude=prelude, is_missing=False)

    completed = _run_python(program + _COUNT_PINNED_THREADS.format(pinned=pinned))

    assert completed.stdout.split() == ["left", str(pinned)], completed.stderr


def test_unknown_choice_of_pinning_is_told() -> None:
    prelude = "import os; os.environ['GEMM_TUNER_PIN'] = 'maybe'"

    completed = _run_python(_CALL_AND_LEAVE.format(prelude=prelude, is_missing=NATIVE is None))

    assert completed.returncode != 0
    assert "GEMM_TUNER_PIN is 'maybe'" in completed.stderr


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@needs_native
def test_the_lock_of_the_interpreter_is_given_up_for_long_calls() -> None:
    kernel = _load("f32 200x200x200 nk none", "scalar_f32_1x1 mc200_nc200_kc200 jc_ic_jr_ir")
    x, packed = _random(200, 200), kernel.pack(_random(200, 200))
    begun, enough, interval = Event(), Event(), sys.getswitchinterval()

    def call() -> None:
        begun.set()
        for _ in range(100):
            if enough.is_set():
                break
            kernel(x, packed)

    sys.setswitchinterval(60)  # others run only where the lock is given up
    try:
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(call)
            begun.wait()
            turns = 0
            while turns <= 5 and not ended.done():
                turns += 1
                time.sleep(0)  # gives the lock up
            enough.set()
    finally:
        sys.setswitchinterval(interval)

    assert turns > 5
