"""Products of two activations, and attention, from the service to the call."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from served import PROBLEM, Site, keep_trial

from gemm_tuner import Client
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.client.swapped import SwappedKernel
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidProblem, InvalidSetting, ServiceFailed
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.space.catalog import family_named

OF_ACTIVATIONS = replace(PROBLEM, operation=Operation.MATMUL)


ATTENTION = Problem.parse("attention f32 8x21x5 scale+causal")


def keep_kernel(site: Site, problem: Problem, text: str) -> None:
    """Store a kernel, faster than the baseline, beside that of the layer."""
    candidate = Candidate.parse(text)
    family = family_named(candidate.micro_kernel.family)
    source = render(problem, candidate, family)
    build = compile_kernel(source, isa=family.isa, toolchain=find_toolchain())
    keep_trial(
        site.repository,
        build,
        cpu=detect_cpu(),
        speed=5,
        problem=problem,
        candidate=candidate,
    )


def assert_multiplies(kernel: Kernel | FallbackKernel | SwappedKernel) -> None:
    """Check a call of several heads."""
    random = np.random.default_rng(3)
    x = random.standard_normal((2, 3, 8, PROBLEM.k), np.float32)
    w = random.standard_normal((1, 3, PROBLEM.n, PROBLEM.k), np.float32)
    bias = random.standard_normal(PROBLEM.n, np.float32)
    right = np.maximum(x @ w.swapaxes(-1, -2) + bias, 0)

    np.testing.assert_allclose(kernel(x, w, bias=bias), right, rtol=1e-4, atol=1e-5)


def test_a_product_is_served_fetched_and_called(site: Site, tmp_path: Path) -> None:
    keep_kernel(site, OF_ACTIVATIONS, "scalar_f32_2x4 mc8_nc32_kc16 jc_ic_jr_ir pack_w")
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        product, layer = client.kernel(OF_ACTIVATIONS.text), client.kernel(PROBLEM)
        question: dict[str, str | int] = {
            "m": 8,
            "n": PROBLEM.n,
            "k": PROBLEM.k,
            "epilogue": "bias+relu",
            "operation": "matmul",
            "cpu": detect_cpu().exact_key,
        }
        answer = httpx.get(f"{address}/v1/kernels", params=question)
        cold = httpx.get(f"{address}/v1/kernels", params={**question, "regime": "cold_weights"})

    assert isinstance(product, Kernel)
    assert isinstance(layer, Kernel)
    assert product.problem == OF_ACTIVATIONS
    assert product.artifact.sha256 != layer.artifact.sha256
    assert_multiplies(product)
    assert OF_ACTIVATIONS.text in answer.text
    assert cold.status_code == 422
    assert "no weights that could be cold" in cold.json()["detail"]
    again = Client(address, cache_dir=tmp_path / "cache").kernel(OF_ACTIVATIONS)
    assert isinstance(again, Kernel)  # from the cache
    assert_multiplies(again)


def test_attention_is_served_fetched_and_called(site: Site, tmp_path: Path) -> None:
    keep_kernel(site, ATTENTION, "scalar_f32_2x4 mc8_nc8_kc5 ic_jc_jr_ir pack_w")
    random = np.random.default_rng(4)
    q, k, v = (random.standard_normal((2, 3, rows, 5), np.float32) for rows in (8, 21, 21))
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        kernel = client.kernel(ATTENTION.text)
        library = client.kernel(replace(ATTENTION, n=22))
        question: dict[str, str | int] = {
            "m": 8,
            "n": 21,
            "k": 5,
            "epilogue": "scale+causal",
            "operation": "attention",
            "cpu": detect_cpu().exact_key,
        }
        answer = httpx.get(f"{address}/v1/kernels", params=question)
        wrong = httpx.get(f"{address}/v1/kernels", params={**question, "epilogue": "relu"})

    assert isinstance(kernel, Kernel)
    assert isinstance(library, FallbackKernel)
    assert ATTENTION.text in answer.text
    assert wrong.status_code == 422
    assert "not those of scores" in wrong.json()["detail"]
    scores = np.where(np.tri(8, 21, 13, dtype=bool), q @ k.swapaxes(-1, -2) * 0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    right = weights @ v / weights.sum(axis=-1, keepdims=True)
    swapped = SwappedKernel(kernel, "it is tuned.")
    for one in (kernel, swapped):
        np.testing.assert_allclose(one(q, k, v, scale=0.5), right, rtol=1e-5, atol=1e-6)


def test_a_call_says_how_many_keys_of_a_range_it_has(site: Site, tmp_path: Path) -> None:
    problem = Problem.parse("attention f32 1..8x1..21x5 scale+causal")
    keep_kernel(site, problem, "scalar_f32_2x4 mc8_nc8_kc5 ic_jc_jr_ir pack_w")
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        kernel = client.kernel(problem)
        exact = client.kernel(problem.with_columns(21))
        question: dict[str, str | int] = {
            "m": "1..8",
            "n": "1..21",
            "k": 5,
            "epilogue": "scale+causal",
            "operation": "attention",
            "cpu": detect_cpu().exact_key,
        }
        answer = httpx.get(f"{address}/v1/kernels", params=question)
        other = httpx.get(f"{address}/v1/kernels", params={**question, "n": "0..21"})

    assert isinstance(kernel, Kernel)
    assert isinstance(exact, FallbackKernel)  # for which nothing was tuned
    assert problem.text in answer.text
    assert "attention f32 1..8x0..21x5 scale+causal" in other.text
    random = np.random.default_rng(5)
    for keys in (1, 7, 21):
        q, k, v = (random.standard_normal((rows, 5), np.float32) for rows in (1, keys, keys))
        weights = np.exp(q @ k.T * 0.5)
        right = weights @ v / weights.sum()
        np.testing.assert_allclose(kernel(q, k, v, scale=0.5), right, rtol=1e-5, atol=1e-6)


def test_a_library_multiplies_where_nothing_was_tuned(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        kernel = client.kernel(replace(OF_ACTIVATIONS, m=PROBLEM.m))

    assert isinstance(kernel, FallbackKernel)
    assert_multiplies(kernel)


def test_a_kernel_takes_the_place_of_a_library_between_two_calls() -> None:
    library = FallbackKernel(problem=OF_ACTIVATIONS, reason="nothing was tuned")
    kernel = SwappedKernel(library, "it is tuned.")

    assert_multiplies(kernel)
    with pytest.raises(InvalidSetting, match="nothing is packed ahead"):
        kernel.pack(np.zeros((PROBLEM.n, PROBLEM.k), np.float32))


class _Problems(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Problem)


class _FormerProblem(metaclass=_Problems):
    """Problems of a version that has no products of two activations and no step `mish`."""

    @staticmethod
    def parse(text: str) -> Problem:
        if "matmul" in text or "mish" in text:
            raise InvalidProblem(f"problem {text!r} is not understood.")
        return Problem.parse(text)


@pytest.fixture
def former_service(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve by a version that knows fewer problems than the client."""
    for module in ("schemas", "answering.resolver", "answering.gathering"):
        monkeypatch.setattr(f"gemm_tuner_service.{module}.Problem", _FormerProblem)
    with site.serving() as address:
        yield address


def test_what_a_former_service_does_not_know_falls_back_with_the_reason(
    former_service: str, tmp_path: Path
) -> None:
    client = Client(former_service, cache_dir=tmp_path / "cache")
    product = client.kernel(OF_ACTIVATIONS, tune="wait")
    assert isinstance(product, FallbackKernel)
    assert "the service's version does not know this problem; update the service" in product.reason
    assert f"problem {OF_ACTIVATIONS.text!r} is not understood" in product.reason
    assert_multiplies(product)

    layer, again = client.kernels([PROBLEM, OF_ACTIVATIONS])
    assert isinstance(layer, Kernel)
    assert isinstance(again, FallbackKernel)

    [other] = client.layer(32, 16, m=[8], epilogue="mish").kernels
    assert isinstance(other, FallbackKernel)
    assert "version does not know this problem" in other.reason

    with pytest.raises(ServiceFailed, match="is not understood"):
        client.resolve(OF_ACTIVATIONS)
