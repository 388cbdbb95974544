"""Libraries in tests: what they compute, and taken away where a test is about their absence."""

from dataclasses import replace

import pytest

from gemm_tuner.arrays.quantise import QuantisedWeights
from gemm_tuner.bench.inputs import Inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import Expected
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.libraries.plain import plain_problem, plain_weights


def expected_of(kernel: FallbackKernel, inputs: Inputs) -> Expected:
    """Return the exact result of what a library computes.

    oneDNN has plain weights of the type of x in the place of quantised ones, NumPy exact ones.
    """
    if not kernel.problem.types.is_weight_only or kernel.library.startswith("numpy"):
        return compute_expected(kernel.problem, inputs)
    assert inputs.scales is not None
    quantised = QuantisedWeights(inputs.w, inputs.scales, inputs.zero_points)
    w = plain_weights(kernel.problem, quantised)
    plain = replace(inputs, w=w, scales=None, zero_points=None)
    return compute_expected(plain_problem(kernel.problem), plain)


def take_onednn_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let others compute in the place of kernels, as if oneDNN were not installed."""

    def refuse() -> None:
        raise BaselineMissing("oneDNN was taken away.")

    monkeypatch.setattr("gemm_tuner.libraries.onednn_layer.open_onednn", refuse)


def take_libraries_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let NumPy compute in the place of kernels, as if it used a library that is not known."""

    def refuse() -> None:
        raise BaselineMissing("OpenBLAS was taken away.")

    take_onednn_away(monkeypatch)
    monkeypatch.setattr("gemm_tuner.libraries.openblas_layer.open_openblas", refuse)
