"""What computes in the place of a kernel is the library that kernels were compared with."""

import copy
import os
import pickle
import shutil
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, Never

import numpy as np
import pytest
from libraries import expected_of

from gemm_tuner.bench.drivers import build_drivers
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.measurement import Library
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.libraries import onednn_layer, onednn_product
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.libraries.finish import load_finish
from gemm_tuner.libraries.onednn import Installed, find_onednn, installed_onednn, open_onednn
from gemm_tuner.libraries.onednn_layer import OneDnnLayer
from gemm_tuner.libraries.openblas import open_openblas
from gemm_tuner.libraries.spelling import Spelling, spellings_of
from gemm_tuner.machine.detect import detect_cpu

SEED = 5
OPENBLAS = Library(text="openblas 0.3.31 + pass", package="numpy 2.4.6")
needs_onednn = pytest.mark.baseline("onednn")
needs_openblas = pytest.mark.baseline("openblas")


@pytest.fixture(autouse=True)
def with_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pass be there where the package was not built."""
    library = load_finish(build_drivers(find_toolchain(), detect_cpu()).finish)
    for module in ("onednn_layer", "openblas_layer"):
        monkeypatch.setattr(f"gemm_tuner.libraries.{module}.built_finish", lambda: library)


def _fallback(text: str, compared_with: Library | None, threads: int | None = 1) -> FallbackKernel:
    return FallbackKernel(
        problem=Problem.parse(text),
        reason="A test asked for it.",
        threads=threads,
        compared_with=compared_with,
    )


def _through_pickle(kernel: FallbackKernel) -> FallbackKernel:
    unpickled = pickle.loads(pickle.dumps(kernel))  # noqa: S301 - what was pickled here
    assert isinstance(unpickled, FallbackKernel)
    return unpickled


def _assert_right(kernel: FallbackKernel, kind: InputKind = InputKind.NORMAL) -> None:
    inputs = make_inputs(kernel.problem, kind, SEED)
    operands: dict[str, Any] = {**inputs.operands}
    packed = kernel.pack(inputs.w, scales=inputs.scales, zero_points=inputs.zero_points)
    out = kernel(inputs.x, packed, **operands)
    assert find_error(expected_of(kernel, inputs), np.asarray(out)) is None


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_threads_are_checked_before_a_library_has_them(threads: int) -> None:
    with pytest.raises(InvalidSetting):
        _fallback("f32 4x8x8 nk bias", None, threads)


@needs_onednn
def test_spellings_for_a_range_are_compared_by_some_of_its_rows() -> None:
    """All rows of this range are 128 GiB of y."""
    _assert_computes_rows(_fallback("f32 1..2147483647x16x16 nk bias+row_scale+relu", None), 3)


def _assert_computes_rows(kernel: FallbackKernel, rows: int) -> None:
    problem = kernel.problem
    x = np.ones((rows, problem.k), np.float32)
    packed = kernel.pack(np.ones((problem.n, problem.k), np.float32))

    y = kernel(
        x, packed, bias=np.ones(problem.n, np.float32), row_scale=np.full(rows, 2, np.float32)
    )

    assert np.asarray(y).tolist() == [[2.0 * (problem.k + 1)] * problem.n] * rows


@needs_openblas
@pytest.mark.parametrize("threads", [None, 1, 2])
@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("f32 5x7x9 nk none", ""),
        ("f32 1x7x9 kn bias+gelu_erf", " + pass"),
        ("f32 1x70x90 nk bias+mish+add", " + pass"),
        ("f32 20x33x65 kn row_scale+elu:0.5+mul", " + pass"),
        ("bf16 20x33x65 nk bias+silu", " + pass"),
        ("bf16_bf16_f32_f32 5x1x9 kn none", " + pass"),
        ("f16 5x7x9 nk bias+add", " + pass"),
        ("f32_s4 5x64x70 nk:g32 bias", " + pass with weights of f32"),
        ("bf16_u8 0..5x7x70 kn:g32 row_scale+bias", " + pass with weights of bf16"),
    ],
)
def test_openblas_computes_where_it_was_the_fastest(
    text: str, passes: str, threads: int | None
) -> None:
    kernel = _fallback(text, OPENBLAS, threads)

    assert kernel.library == f"{open_openblas().text}{passes}"
    assert kernel.reason == (
        "A test asked for it. The comparison was with openblas 0.3.31 + pass."
        if OPENBLAS.is_version_of(open_openblas().text)
        else "A test asked for it. The comparison was with openblas 0.3.31 + pass, which is not "
        f"installed here: {kernel.library} computes instead."
    )
    _assert_right(kernel)


@needs_openblas
def test_openblas_keeps_nan_and_infinity_and_reads_rows_at_any_distance() -> None:
    kernel = _fallback("f32 20x33x65 nk bias", OPENBLAS)
    _assert_right(kernel, InputKind.SPECIAL)
    inputs = make_inputs(kernel.problem, InputKind.NORMAL, SEED)
    x = np.full((20, 70), 77, np.float32)
    x[:, :65] = inputs.x
    out = np.full((20, 40), 77, np.float32)

    y = kernel(x[:, :65], kernel.pack(inputs.w), out=out[:, :33], bias=inputs.operands["bias"])

    assert find_error(expected_of(kernel, inputs), np.asarray(y)) is None
    assert np.array_equal(out[:, 33:], np.full((20, 7), 77, np.float32))


@needs_openblas
def test_threads_of_openblas_are_those_of_the_calls_that_run_now() -> None:
    library = open_openblas()
    with library.in_threads(None) as usual:
        pass
    both_run = Barrier(2)

    def call(_number: int) -> int:
        with library.in_threads(1):
            both_run.wait(timeout=20)
            with library.in_threads(None) as used:
                return used

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(call, range(2))) == [1, 1]
    with library.in_threads(None) as after:
        assert after == usual


@needs_openblas
def test_a_forked_child_computes_by_openblas() -> None:
    kernel = _fallback("f32 64x96x128 nk bias+relu", OPENBLAS, threads=2)
    _assert_right(kernel)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that hangs
        try:
            _assert_right(kernel)
        except BaseException:  # noqa: BLE001 - the child must not go on with the tests
            os._exit(1)
        os._exit(0)
    _child, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0


@needs_onednn
@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, _through_pickle])
def test_a_copy_computes_from_the_same_packed_weights(
    again: Callable[[FallbackKernel], FallbackKernel],
) -> None:
    kernel = _fallback("f32 5x7x9 nk row_scale+bias", None)
    inputs = make_inputs(kernel.problem, InputKind.NORMAL, SEED)
    operands: dict[str, Any] = {**inputs.operands}

    copied = again(kernel)
    y = copied(inputs.x, kernel.pack(inputs.w), **operands)

    assert (copied.reason, copied.library) == (kernel.reason, kernel.library)
    assert find_error(expected_of(kernel, inputs), np.asarray(y)) is None


@needs_onednn
def test_a_problem_is_spelled_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "f32 6x7x9 nk row_scale+bias+relu"
    choices = iter((1, 0))
    monkeypatch.setattr(
        "gemm_tuner.libraries.onednn_layer.pick_fastest", lambda _runs: next(choices)
    )

    formats = {_fallback(text, None).packed_format for _time in range(3)}

    assert len(formats) == 1
    assert next(choices) == 0


@needs_onednn
def test_of_several_onednn_the_package_of_the_verdict_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "libdnnl.so.3"
    shutil.copy(find_onednn(), other)
    both = (*installed_onednn(), Installed(other, "onednn-of-a-test 9.9", 0.0))
    monkeypatch.setattr("gemm_tuner.libraries.choose.installed_onednn", lambda: both)
    version = open_onednn().text

    found = [
        _fallback("f32 5x7x9 nk bias", Library(text=version, package=one.package)) for one in both
    ]

    libraries = []
    for kernel in found:
        layer: Any = kernel._layer
        assert isinstance(layer, OneDnnLayer)
        libraries.append(layer._form.product.library)
        assert kernel.reason.endswith(f"The comparison was with {version}.")
        _assert_right(kernel)
    assert libraries[-1] is open_onednn(other)
    assert libraries[0] is not libraries[-1]


@needs_onednn
def test_where_the_package_does_not_load_another_onednn_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libdnnl.so.3"
    broken.write_text("no library")
    both = (*installed_onednn(), Installed(broken, "onednn-of-a-test 9.9", 0.0))
    monkeypatch.setattr("gemm_tuner.libraries.choose.installed_onednn", lambda: both)

    kernel = _fallback(
        "f32 5x7x9 nk bias", Library(text="onednn 9.9.0", package="onednn-of-a-test 9.9")
    )

    assert kernel.library == open_onednn().text
    assert f"with onednn 9.9.0. {kernel.library} computes instead: " in kernel.reason
    assert "does not load" in kernel.reason
    _assert_right(kernel)


@needs_onednn
@pytest.mark.parametrize(
    ("text", "compared_with", "reason"),
    [
        (
            "f32 5x7x9 nk bias",
            Library(text="onednn 99.1.2", package="onednn 2099.1"),
            "The comparison was with onednn 99.1.2, which is not installed here: onednn 3.",
        ),
        (
            "f32 5x7x9 nk bias",
            Library(text="onnxruntime 1.31.1"),
            "The comparison was with onnxruntime 1.31.1, which is not called from here: onednn 3.",
        ),
        (
            "u8_s8_s32_s32 5x7x9",
            OPENBLAS,
            "computes instead: OpenBLAS does not compute u8",
        ),
        ("f32 5x7x9 nk bias", None, "A test asked for it."),
    ],
)
def test_where_it_cannot_be_had_the_best_computes_and_the_reason_says_so(
    text: str, compared_with: Library | None, reason: str
) -> None:
    kernel = _fallback(text, compared_with)

    assert kernel.library.startswith("onednn 3.")
    assert reason in kernel.reason
    _assert_right(kernel)


@needs_onednn
@needs_openblas
@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("matmul f32 1x64x24 nk", "openblas"),
        ("matmul f32 0..16x8x24 kn", "openblas"),
        ("matmul f32 1x8x24 kn scale", "openblas"),
        ("matmul f32 9x8x24 kn scale", "onednn"),
        ("matmul bf16 1x8x24 nk", "onednn"),
        ("matmul int8 4x8x24 nk", "onednn"),
        ("f32 1x64x24 nk", "onednn"),
    ],
)
def test_of_activations_the_library_computes_whose_calls_cost_least(
    text: str, library: str
) -> None:
    kernel = _fallback(text, None)

    assert kernel.library.startswith(f"{library} ")
    assert kernel.reason == "A test asked for it."


@needs_onednn
def test_what_is_packed_in_a_call_lies_where_it_lay_in_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spellings(problem: Problem, *, of_fixed_layer: bool) -> list[Spelling]:
        found = spellings_of(problem, of_fixed_layer=of_fixed_layer)
        return [one for one in found if one.reorders_w]

    monkeypatch.setattr(onednn_product, "spellings_of", spellings)
    monkeypatch.setattr(onednn_layer, "_CHOSEN", {})
    layer = OneDnnLayer(Problem.parse("matmul f32 4x16x24 kn"), 1)
    w = np.random.default_rng(SEED).standard_normal((24, 16), np.float32)
    x, y = w[:4, :8].repeat(3, axis=1), np.empty((4, 16), np.float32)
    layer.compute(x, w, y, [], 1)

    def allocate(size_bytes: int) -> Never:
        raise AssertionError(f"{size_bytes} bytes are allocated in each call")

    monkeypatch.setattr(onednn_layer, "allocate_aligned", allocate)
    layer.compute(x, w, y, [], 1)

    np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)


@needs_onednn
@needs_openblas
def test_the_fastest_of_the_race_that_can_run_here_computes_instead() -> None:
    kernel = FallbackKernel(
        problem=Problem.parse("f32 5x7x9 nk bias"),
        reason="A test asked for it.",
        compared_with=Library(text="mkl 2026.0", package="mkl 2026.0.0"),
        instead=OPENBLAS,
    )

    assert kernel.library == f"{open_openblas().text} + pass"
    assert kernel.reason == (
        "A test asked for it. The comparison was with mkl 2026.0, which is not called from here: "
        f"{kernel.library} computes instead."
    )
    _assert_right(kernel)
