"""oneDNN or NumPy in the place of a kernel: the same calls, the same results, the same refusals."""

import ctypes
import os
import re
import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from libraries import expected_of, take_libraries_away

from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.domain.epilogue import STEP_KINDS
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing, InvalidArray, InvalidSetting
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.libraries.onednn import open_onednn
from gemm_tuner.libraries.onednn_layer import OneDnnLayer
from gemm_tuner.libraries.openblas import open_openblas
from gemm_tuner.libraries.spelling import Spelling, spellings_of
from gemm_tuner.machine.detect import ISA_VARIABLE

SEED = 3
FLOAT_STEPS = [name for name, kind in STEP_KINDS.items() if not kind.is_offset]
needs_onednn = pytest.mark.baseline("onednn")


@pytest.fixture(params=[pytest.param("onednn", marks=needs_onednn), "numpy"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        take_libraries_away(monkeypatch)
    name: str = request.param
    return name


@pytest.fixture
def fresh_libraries() -> Iterator[None]:
    for opened in (open_onednn, open_openblas):
        opened.cache_clear()
    yield
    for opened in (open_onednn, open_openblas):
        opened.cache_clear()


@pytest.fixture
def inner_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN be asked for inner products alone."""

    def spellings(problem: Problem, *, of_fixed_layer: bool) -> list[Spelling]:
        found = spellings_of(problem, of_fixed_layer=of_fixed_layer)
        return [one for one in found if one.is_inner_product]

    monkeypatch.setattr("gemm_tuner.libraries.onednn_product.spellings_of", spellings)
    monkeypatch.setattr("gemm_tuner.libraries.onednn_layer._CHOSEN", {})


def _fallback(text: str, threads: int | None = None) -> FallbackKernel:
    return FallbackKernel(
        problem=Problem.parse(text), reason="A test asked for it.", threads=threads
    )


def _assert_right(kernel: FallbackKernel, seed: int = SEED) -> None:
    inputs = make_inputs(kernel.problem, InputKind.NORMAL, seed)
    operands: dict[str, Any] = {**inputs.operands}
    packed = kernel.pack(inputs.w, scales=inputs.scales, zero_points=inputs.zero_points)
    out = kernel(inputs.x, packed, **operands)
    assert find_error(expected_of(kernel, inputs), np.asarray(out)) is None


@pytest.mark.parametrize("epilogue", ["none", "bias+gelu_erf+add+mul+add", *FLOAT_STEPS])
@pytest.mark.parametrize(
    ("types", "layout"),
    [
        *(("f32", "nk"), ("f32", "kn"), ("bf16", "nk")),
        *(("bf16_bf16_f32_f32", "kn"), ("f32_f32_f32_bf16", "nk")),
    ],
)
def test_every_step_is_computed(types: str, layout: str, epilogue: str, library: str) -> None:
    kernel = _fallback(f"{types} 5x7x9 {layout} {epilogue}")

    assert kernel.library.startswith(library)
    _assert_right(kernel)


@needs_onednn
@pytest.mark.usefixtures("inner_products")
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("epilogue", ["none", "bias+gelu_erf+add+mul+add", *FLOAT_STEPS])
def test_every_step_follows_an_inner_product(epilogue: str, layout: str) -> None:
    kernel = _fallback(f"f32 1..40x27x33 {layout} {epilogue}")

    assert "as an inner product" in kernel.packed_format
    inputs = make_inputs(kernel.problem, InputKind.NORMAL, SEED)
    packed = kernel.pack(inputs.w)
    for rows in (1, 7, 40):
        some = inputs.first_rows(rows)
        operands: dict[str, Any] = {**some.operands}
        y = kernel(some.x, packed, **operands)
        assert find_error(compute_expected(kernel.problem, some), np.asarray(y)) is None, rows


@pytest.mark.parametrize(
    "text",
    [
        "u8_s8_s32_s32 5x7x9 nk x_zero_point",
        "s8_s8_s32_s32 20x33x65 kn none",
        "s8_s8_s32_f32 5x7x9 nk x_row_zero_point+row_scale+channel_scale+bias+relu",
        "s8_s8_s32_bf16 20x33x65 kn row_scale+channel_scale+bias+silu+add",
        "u8_s8_s32_u8 5x7x9 kn x_zero_point+scale+bias+gelu_erf+scale+y_zero_point",
        "s8_s8_s32_s8 20x33x65 nk x_zero_point+channel_scale+bias+y_zero_point",
        "u8_s8_s32_bf16 5x7x9 kn none",
        "u8_s8_s32_f16 5x7x9 kn row_scale",
    ],
)
def test_quantised_layers_are_computed(text: str, library: str) -> None:
    kernel = _fallback(text)

    assert kernel.library.startswith(library)
    _assert_right(kernel)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("text", ["f16 5x7x9 nk bias+silu", "f16_f16_f16_f16 5x7x9 kn add"])
def test_f16_is_computed_where_onednn_lacks_it_too(text: str) -> None:
    _assert_right(_fallback(text))


def test_a_tie_is_rounded_before_the_zero_point(library: str) -> None:
    kernel = _fallback("s8_s8_s32_s8 1x1x1 nk scale+y_zero_point")
    x, w = np.full((1, 1), 5, np.int8), np.ones((1, 1), np.int8)

    y = kernel(x, kernel.pack(w), scale=0.5, y_zero_point=1)

    assert y[0, 0] == 3, library  # 2.5 becomes 2, where 3.5 would become 4


def test_each_number_of_rows_of_a_range_is_computed(library: str) -> None:
    kernel = _fallback("bf16 0..20x20x30 nk bias+add")
    inputs = make_inputs(kernel.problem, InputKind.NORMAL, SEED)
    packed = kernel.pack(inputs.w)

    for rows in range(21):
        some = inputs.first_rows(rows)
        operands: dict[str, Any] = {**some.operands}
        y = kernel(some.x, packed, **operands)
        expected = compute_expected(kernel.problem, some)
        assert find_error(expected, np.asarray(y)) is None, (library, rows)


def test_rows_may_be_at_any_distance(library: str) -> None:
    kernel = _fallback("f32 5x7x9 kn add")
    inputs = make_inputs(kernel.problem, InputKind.NORMAL, SEED)
    wide = {
        name: np.full((array.shape[0], array.shape[1] + 3), 77, np.float32)
        for name, array in {"x": inputs.x, "w": inputs.w, **inputs.operands}.items()
    }
    for name, array in {"x": inputs.x, "w": inputs.w, **inputs.operands}.items():
        wide[name][:, :-3] = array
    out = np.full((5, 10), 77, np.float32)

    y = kernel(
        wide["x"][:, :-3],
        kernel.pack(wide["w"][:, :-3]),
        out=out[:, :-3],
        add=wide["add"][:, :-3],
    )

    assert np.shares_memory(y, out)
    assert find_error(compute_expected(kernel.problem, inputs), y) is None, library
    assert np.array_equal(out[:, -3:], np.full((5, 3), 77, np.float32))


def test_nan_and_infinity_of_the_product_are_kept(library: str) -> None:
    kernel = _fallback("f32 20x33x65 nk bias")
    inputs = make_inputs(kernel.problem, InputKind.SPECIAL, SEED)
    operands: dict[str, Any] = {**inputs.operands}

    y = kernel(inputs.x, kernel.pack(inputs.w), **operands)

    assert find_error(compute_expected(kernel.problem, inputs), y) is None, library


@needs_onednn
@pytest.mark.parametrize("threads", [None, 1, 2, 3])
def test_threads_of_a_call_are_those_of_openmp_for_its_time(threads: int | None) -> None:
    kernel = _fallback("f32 64x96x128 nk bias+relu", threads=threads)
    inputs = make_inputs(kernel.problem, InputKind.NORMAL, SEED)
    packed = kernel.pack(inputs.w)
    seen = _watch_threads(kernel)

    for own in (None, 2):
        y = kernel(inputs.x, packed, threads=own, bias=inputs.operands["bias"])
        assert find_error(compute_expected(kernel.problem, inputs), y) is None

    usual = open_onednn().max_threads()
    assert seen == [threads or usual, 2]


def _watch_threads(kernel: FallbackKernel) -> list[int]:
    """Return a list that gets the threads that OpenMP has when a primitive is looked for."""
    layer: Any = kernel._layer
    assert isinstance(layer, OneDnnLayer)
    matmul: Any = layer._form.product
    find, seen = matmul._primitive, []

    def watch(rows: int, threads: int | None) -> object:
        seen.append(open_onednn().max_threads())
        return find(rows, threads)

    matmul._primitive = watch
    return seen


@needs_onednn
def test_a_forked_child_computes() -> None:
    kernel = _fallback("f32 256x256x256", threads=2)
    _assert_right(kernel)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that hangs
        os._exit(_status_of(kernel))
    _child, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0


def _status_of(kernel: FallbackKernel) -> int:
    try:
        _assert_right(kernel)
    except BaseException:  # noqa: BLE001 - the child must not go on with the tests
        return 1
    return 0


def test_calls_at_the_same_time_do_not_disturb_each_other(library: str) -> None:
    kernel = _fallback("bf16 1..64x48x64 nk bias+gelu_tanh+add", threads=1)
    cases = [make_inputs(kernel.problem, InputKind.NORMAL, seed) for seed in range(4)]
    weights = [kernel.pack(case.w) for case in cases]
    expected = [compute_expected(kernel.problem, case) for case in cases]

    def call(number: int) -> str | None:
        place, rows = number % len(cases), 1 + 7 * number % 64
        some = cases[place].first_rows(rows)
        operands: dict[str, Any] = {**some.operands}
        y = kernel(some.x, weights[place], **operands)
        return find_error(expected[place].first_rows(rows), np.asarray(y))

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(call, range(400))) == {None}, library


@pytest.mark.usefixtures("fresh_libraries")
def test_without_the_wheel_numpy_computes_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(wheel: str, _library: str, *, install: str) -> None:
        raise BaselineMissing(f"{wheel} is not installed; run: {install}.")

    monkeypatch.setattr("gemm_tuner.libraries.onednn.find_in_wheel", refuse)
    monkeypatch.setattr("gemm_tuner.libraries.onednn._SYSTEM_FOLDERS", ())
    monkeypatch.setattr("gemm_tuner.libraries.openblas_layer.built_finish", lambda: None)

    kernel = _fallback("bf16 5x7x9")

    assert kernel.library == f"numpy {np.__version__}"
    assert kernel.reason == (
        f"A test asked for it. {kernel.library} computes instead of oneDNN: onednn-cpu-gomp is not "
        'installed (libdnnl.so.3 was not found); run: pip install "gemm-tuner[onednn]".'
    )
    _assert_right(kernel)


@needs_onednn
@pytest.mark.usefixtures("fresh_libraries")
def test_without_openmp_numpy_computes_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_path: str, **_mode: int) -> None:
        raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)

    kernel = _fallback("bf16 5x7x9")

    assert kernel.library.startswith("numpy")
    assert "libgomp1 on Debian" in kernel.reason


@needs_onednn
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f32 5x7x0 nk bias", "has no elements"),
        ("f32 0x7x3 nk bias", "has no elements"),
    ],
)
def test_what_onednn_does_not_take_is_computed_by_numpy(text: str, reason: str) -> None:
    kernel = _fallback(text)

    assert kernel.library.startswith("numpy")
    assert reason in kernel.reason
    _assert_right(kernel)


@needs_onednn
@pytest.mark.parametrize(
    "text", ["f32 3x1x5 nk bias", "int8 0..9x1x8 nk none", "f32 8x64x64 kn none"]
)
def test_onednn_is_not_asked_in_a_way_that_a_signal_breaks(text: str) -> None:
    kernel = FallbackKernel(problem=Problem.parse(text), reason="", threads=1)

    assert open_onednn().version >= (3, 12) or "gemm:jit" not in kernel.packed_format


@needs_onednn
@pytest.mark.parametrize(
    ("text", "library", "spelling"),
    [
        ("int8 32x64x64 nk row_scale+bias", "onednn 3.", "brg"),
        ("f32 32x64x64 nk row_scale+bias", "onednn 3.", "brg"),
        (
            "u8_s8_s32_f32 8x33x65 kn x_row_zero_point+row_scale+channel_scale+bias",
            "+ pass",
            "0 of 4 steps fused, then a pass",
        ),
        ("f32_s4 5x64x70 nk:g32 bias", "with weights of f32", "fused"),
        ("bf16_u8 5x7x70 kn:g32 row_scale+bias", "with weights of bf16", ""),
        ("f32_bf16_f32_f32 5x7x9 nk bias", "onednn 3.", "x and w in f32"),
    ],
)
def test_onednn_is_asked_in_a_way_that_it_computes_fast(
    text: str, library: str, spelling: str
) -> None:
    if "f32_bf16" in text:
        spelling = "fused"  # x is of f32 as it is
    kernel = _fallback(text)
    layer = kernel._layer

    assert isinstance(layer, OneDnnLayer)
    assert library in kernel.library
    assert re.search(spelling, layer.spelling)
    assert not layer.spelling.startswith("ref")
    _assert_right(kernel)


@needs_onednn
@pytest.mark.parametrize("epilogue", FLOAT_STEPS)
def test_a_pass_without_a_compiler_is_done_by_numpy(
    epilogue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.libraries.onednn_layer.built_finish", lambda: None)

    _assert_right(_fallback(f"s8_s8_s32_f32 5x7x9 nk x_row_zero_point+row_scale+{epilogue}"))


def test_a_step_that_only_numpy_knows_is_computed(library: str) -> None:
    problem = Problem.parse("s8_s8_s32_f32 5x7x9 nk x_row_zero_point+row_scale+elu+bias")
    new: dict[str, Any] = {"onednn": None, "after_product": None, "left_to_numpy": "it is new"}
    steps = tuple(
        replace(step, kind=replace(step.kind, **new)) if step.kind.name == "elu" else step
        for step in problem.epilogue.steps
    )
    epilogue = replace(problem.epilogue, steps=steps)

    kernel = FallbackKernel(problem=replace(problem, epilogue=epilogue), reason="A test asked.")

    assert kernel.library.startswith(library)
    _assert_right(kernel)


_MOST_EXACT_K = 2**24 // (255 * 128)


@needs_onednn
@pytest.mark.parametrize(
    "text",
    [
        f"u8_s8_s32_s32 5x7x{_MOST_EXACT_K}",
        "u8_s8_s32_f32 5x7x1000 nk x_row_zero_point+row_scale+channel_scale+bias",
    ],
)
def test_bytes_are_multiplied_as_floats_where_sums_of_bytes_saturate(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx2,fma")

    kernel = _fallback(text)

    layer = kernel._layer
    assert isinstance(layer, OneDnnLayer)
    assert "x and w in f32" in layer.spelling
    _assert_right(kernel)


@needs_onednn
def test_the_greatest_sums_of_bytes_are_exact_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx2,fma")
    kernel = _fallback(f"u8_s8_s32_s32 2x3x{_MOST_EXACT_K}")
    x = np.full((2, _MOST_EXACT_K), 255, np.uint8)
    w = np.full((3, _MOST_EXACT_K), -128, np.int8)
    x[0, 0] = 254

    y = kernel(x, kernel.pack(w))

    right = x.astype(np.int64) @ w.T.astype(np.int64)
    assert np.array_equal(np.asarray(y), right)


@needs_onednn
def test_bytes_are_left_to_numpy_where_onednn_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of bytes saturate, and as floats they are not exact."""
    monkeypatch.setenv(ISA_VARIABLE, "avx2,fma")

    kernel = _fallback(f"u8_s8_s32_s32 5x7x{_MOST_EXACT_K + 1}")

    assert kernel.library.startswith("numpy")
    assert "saturate" in kernel.reason


@pytest.mark.parametrize("threads", [0, -1, 10**6])
def test_threads_out_of_range_are_refused(threads: int, library: str) -> None:
    kernel = _fallback("f32 4x3x2")
    packed = kernel.pack(np.ones((3, 2), np.float32))

    with pytest.raises(InvalidSetting, match=f"threads = {threads}"):
        kernel(np.ones((4, 2), np.float32), packed, threads=threads)
    assert library in kernel.library


def test_out_must_not_be_an_operand(library: str) -> None:
    kernel = _fallback("f32 4x3x2 nk add")
    packed = kernel.pack(np.ones((3, 2), np.float32))
    add = np.ones((4, 3), np.float32)

    with pytest.raises(InvalidArray, match="out overlaps add"):
        kernel(np.ones((4, 2), np.float32), packed, out=add, add=add)
    assert library in kernel.library


@needs_onednn
def test_weights_of_another_library_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _fallback("f32 4x3x2")
    take_libraries_away(monkeypatch)
    other = _fallback("f32 4x3x2").pack(np.ones((3, 2), np.float32))

    with pytest.raises(InvalidArray, match="has the layout 'numpy"):
        kernel(np.ones((4, 2), np.float32), other)


@pytest.mark.parametrize(
    ("x", "operands", "message"),
    [
        (np.ones((5, 2), np.float32), {"bias": np.ones(3, np.float32)}, "x has 5 rows"),
        (np.ones((4, 2), np.float64), {"bias": np.ones(3, np.float32)}, "float64"),
        (np.ones((2, 4), np.float32).T, {"bias": np.ones(3, np.float32)}, "ascontiguousarray"),
        ([[1.0, 2.0]], {"bias": np.ones(3, np.float32)}, "x is a list"),
        (np.ones((4, 2), np.float32), {}, "reads bias, but got none"),
        (np.ones((4, 2), np.float32), {"bais": np.ones(3, np.float32)}, "but got bais"),
        (np.ones((4, 2), np.float32), {"bias": np.ones(4, np.float32)}, r"shape \(4,\)"),
    ],
)
def test_a_wrong_array_is_named(
    x: Any,  # noqa: ANN401 - users pass anything
    operands: dict[str, Any],
    message: str,
    library: str,
) -> None:
    kernel = _fallback("f32 4x3x2 nk bias")
    packed = kernel.pack(np.ones((3, 2), np.float32))

    with pytest.raises(InvalidArray, match=message):
        kernel(x, packed, **operands)
    assert library in kernel.library
