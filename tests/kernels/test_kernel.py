from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from planted import CANDIDATE, PROBLEM, build_planted

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.artifact import ABI_VERSION
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.errors import (
    AbiMismatch,
    DigestMismatch,
    InvalidArray,
    InvalidSetting,
    IsaNotUsable,
    KernelRejected,
)
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel, load_kernel

M, N, K = 5, 7, 3


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    build = build_planted(find_toolchain())
    return load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())


@pytest.fixture(scope="module")
def x() -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((M, K), np.float32)


@pytest.fixture(scope="module")
def w() -> NDArray[np.float32]:
    return np.random.default_rng(2).standard_normal((N, K), np.float32)


BIAS = np.linspace(-1, 1, N, dtype=np.float32)


def _expected(x: NDArray[np.float32], w: NDArray[np.float32]) -> NDArray[np.float32]:
    result: NDArray[np.float32] = np.maximum(x @ w.T + BIAS, 0)
    return result


def _assert_close(actual: NDArray[np.generic], expected: NDArray[np.float32]) -> None:
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual.astype(np.float32), expected, rtol=1e-5, atol=1e-6)


def test_kernel_says_what_it_is(kernel: Kernel) -> None:
    assert kernel.problem.text == PROBLEM.text
    assert kernel.candidate.text == CANDIDATE


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_call_computes_the_layer(
    kernel: Kernel, x: NDArray[np.float32], w: NDArray[np.float32], threads: int
) -> None:
    y = kernel(x, kernel.pack(w), bias=BIAS, threads=threads)

    _assert_close(y, _expected(x, w))


def test_call_takes_rows_at_any_distance(
    kernel: Kernel, x: NDArray[np.float32], w: NDArray[np.float32]
) -> None:
    wide_x, wide_w = np.zeros((M, K + 4), np.float32), np.zeros((N, K + 2), np.float32)
    wide_x[:, 1 : K + 1], wide_w[:, :K] = x, w
    wide_y = np.zeros((M, N + 3), np.float32)

    result = kernel(wide_x[:, 1 : K + 1], kernel.pack(wide_w[:, :K]), bias=BIAS, out=wide_y[:, :N])

    assert np.shares_memory(result, wide_y)
    _assert_close(wide_y[:, :N], _expected(x, w))
    assert not wide_y[:, N:].any()


def test_two_kernels_stay_two(x: NDArray[np.float32], w: NDArray[np.float32]) -> None:
    right = build_planted(find_toolchain())
    ones = build_planted(find_toolchain(), "y[row * ldy + column] = 1;")
    kernels = [
        load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
        for build in (right, ones)
    ]

    results = [kernel(x, kernel.pack(w), bias=BIAS) for kernel in kernels]

    _assert_close(results[0], _expected(x, w))
    assert (results[1] == 1).all()


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        ({}, "reads bias, but got none"),
        ({"bias": BIAS, "add": BIAS}, "bias, add"),
        ({"bias": BIAS[:3]}, "bias has the shape"),
    ],
)
def test_missing_or_unknown_operands_are_refused(
    kernel: Kernel,
    x: NDArray[np.float32],
    w: NDArray[np.float32],
    operands: dict[str, NDArray[np.float32]],
    reason: str,
) -> None:
    with pytest.raises(InvalidArray, match=reason):
        kernel(x, kernel.pack(w), out=None, threads=1, parts=None, **operands)


def test_other_number_of_rows_is_refused(kernel: Kernel, w: NDArray[np.float32]) -> None:
    with pytest.raises(InvalidArray, match="x has 6 rows"):
        kernel(np.zeros((6, K), np.float32), kernel.pack(w), bias=BIAS)


def test_weights_of_another_kernel_are_refused(
    kernel: Kernel, x: NDArray[np.float32], w: NDArray[np.float32]
) -> None:
    other = kernel.pack(w)._replace(owner="0" * 64)

    with pytest.raises(InvalidArray, match="packed has the layout '000000000000"):
        kernel(x, other, bias=BIAS)


def test_no_threads_are_refused(
    kernel: Kernel, x: NDArray[np.float32], w: NDArray[np.float32]
) -> None:
    with pytest.raises(InvalidSetting, match="threads = 0"):
        kernel(x, kernel.pack(w), bias=BIAS, threads=0)


def test_refusal_of_the_kernel_is_an_error(x: NDArray[np.float32], w: NDArray[np.float32]) -> None:
    build = build_planted(find_toolchain(), "return GEMM_TUNER_BAD_ARGS;")
    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())

    with pytest.raises(KernelRejected, match="refused its arguments"):
        kernel(x, kernel.pack(w), bias=BIAS)


def test_changed_bytes_are_not_loaded() -> None:
    build = build_planted(find_toolchain())

    with pytest.raises(DigestMismatch):
        load_kernel(build.binary + b"\0", artifact=build.artifact, cpu=detect_cpu())


def test_missing_features_are_named() -> None:
    build = build_planted(find_toolchain())
    artifact = replace(build.artifact, required_isa=frozenset({IsaFeature.AMX_INT8}))

    with pytest.raises(IsaNotUsable, match="amx_int8"):
        load_kernel(build.binary, artifact=artifact, cpu=replace(detect_cpu(), isa=frozenset()))


def test_library_that_does_not_say_what_it_computes_is_refused() -> None:
    build = build_planted(find_toolchain(), problem="f32 5x7")

    with pytest.raises(KernelRejected, match="does not say what it computes"):
        load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())


def test_library_that_says_another_abi_is_refused() -> None:
    build = build_planted(find_toolchain(), abi=ABI_VERSION + 1)

    with pytest.raises(AbiMismatch, match=f"version {ABI_VERSION + 1}"):
        load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
