"""What attention is compared with: each library computes it, or says why it does not."""

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from planted import build_planted

from gemm_tuner.bench.baselines import attention_zentorch, ways
from gemm_tuner.bench.baselines.attention_torch import TorchAttention
from gemm_tuner.bench.baselines.baseline import Baseline, Row
from gemm_tuner.bench.baselines.choose import baseline_rows, raced_packages
from gemm_tuner.bench.baselines.learn import check_baseline
from gemm_tuner.bench.correctness import Case
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.regimes import WeightCopies
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.bench.workload import make_workload
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries import wheels
from gemm_tuner.libraries.attention_layer import AttentionLayer, SoftmaxStruct
from gemm_tuner.libraries.finish import TeamStruct, built_finish
from gemm_tuner.libraries.openmp import OpenMp
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.memory import address_of


def row_named(name: str) -> Row:
    """Return a library by its name."""
    return next(one for one in baseline_rows() if one.name == name)


def found(name: str) -> Baseline:
    """Return the first installed copy of a library."""
    copy, *_others = row_named(name).find(None)  # type: ignore[arg-type]  # none of them reads it
    return copy.baseline


def host_beside(text: str, baseline: str, threads: int) -> TrialHost:
    """Return a process in which a library was found to be right."""
    toolchain = find_toolchain()
    return TrialHost(
        Problem.parse(text),
        threads=threads,
        baseline=baseline,
        toolchain=toolchain,
        seed=1,
        scalar_build=lambda: build_planted(toolchain),
    )


def of_library(name: str, *values: object) -> ParameterSet:
    """Return a parameter for tests of a library, which must be installed."""
    library = name.removesuffix("-attention")
    return pytest.param(name, *values, marks=pytest.mark.baseline(library))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of zentorch
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        of_library(f"{name}-attention", dtype)
        for name in ("onednn", "openblas", "torch", "zentorch")
        for dtype in ("f32", "bf16", "f16")
    ],
)
@pytest.mark.parametrize("steps", ["scale+causal", "scale+add+causal"])
def test_a_library_computes_what_it_is_compared_with(name: str, dtype: str, steps: str) -> None:
    problem = Problem.parse(f"attention {dtype} 9x9x16 {steps}")
    case = Case(problem, InputKind.NORMAL, seed=4)

    error = check_baseline(found(name), problem, case, threads=1)

    assert isinstance(error, float), error


# Both have threads that a process of tests should not have.
@pytest.mark.parametrize("name", [of_library("openvino-attention"), of_library("mkl-attention")])
@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("attention f32 9x9x16 scale+causal", 1),
        ("attention f32 9x9x16 scale+causal", 2),
        ("attention f32 5x9x16 add+causal", 1),
        ("attention f32 1x33x8 causal", 2),
    ],
)
def test_a_library_with_threads_of_its_own_computes_attention(
    name: str, text: str, threads: int
) -> None:
    with host_beside(text, name, threads) as host:
        (implementation,) = host.baselines().implementations.values()

    assert host.baselines().text.startswith(name.removesuffix("-attention"))
    assert implementation


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        of_library("torch-attention", "attention f32 9x9x16 scale+causal", 4),
        of_library("torch-attention", "attention bf16 9x9x16 scale+add+causal", 2),
        of_library("torch-attention", "attention f32 5x9x16 causal", 2),
        of_library("torch-attention", "attention f32 4x9x16 none", 2),
        of_library("openvino-attention", "attention f32 7x9x8 scale+add+causal", 2),
        of_library("openvino-attention", "attention f32 4x9x8 none", 2),
    ],
)
def test_whichever_way_is_the_fastest_computes_the_whole_problem(
    name: str, text: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the fastest can be chosen by its time alone: none leaves a step out."""
    problem, tried = Problem.parse(text), set()
    case = Case(problem, InputKind.NORMAL, seed=4)
    for number in range(count):

        def pick(calls: Sequence[object], number: int = number) -> int:
            assert len(calls) == count
            return number

        monkeypatch.setattr(ways, "pick_fastest", pick)
        baseline = found(name)
        error = check_baseline(baseline, problem, case, threads=1)
        assert isinstance(error, float), f"{baseline.implementation}: {error}"
        tried.add(baseline.implementation)

    assert len(tried) == count


@pytest.mark.baseline("torch")
def test_a_short_call_of_pytorch_is_tried_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = import_module("torch")
    problem = Problem.parse("attention f32 4x9x16 scale")
    workload = make_workload(problem, make_inputs(problem, InputKind.NORMAL, seed=4), threads=2)
    baseline, seen = TorchAttention(), []
    monkeypatch.setattr(ways, "pick_fastest", lambda calls: len(calls) - 2)
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(*arrays: object, **settings: object) -> object:
        seen.append(torch.get_num_threads())
        return attend(*arrays, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    baseline.prepare(workload)._make_call(workload.w)()

    assert baseline.implementation.endswith("flash, on 1 thread")
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.baseline("torch")
def test_pytorch_is_raced_in_the_shortest_budget() -> None:
    packages = raced_packages(0.0, attends=True)

    assert any(package.startswith("torch ") for package in packages)


@pytest.mark.baseline("openvino")
def test_openvino_is_raced_where_there_is_time_to_load_it() -> None:
    for limit_s, is_raced in ((0.5, False), (1.0, True)):
        packages = raced_packages(limit_s, attends=True)

        assert any(package.startswith("openvino ") for package in packages) is is_raced


def test_all_but_the_products_of_mkl_are_raced_for_attention() -> None:
    not_raced = [row.name for row in baseline_rows() if row.attention_alone and not row.is_raced]

    assert not_raced == ["mkl-attention"]


@pytest.mark.baseline("torch")
def test_a_call_of_pytorch_is_the_function_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = import_module("torch")
    problem = Problem.parse("attention f32 1x64x16 scale+causal")
    inputs = make_inputs(problem, InputKind.NORMAL, seed=4)
    baseline, given = TorchAttention(), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(*arrays: object, **settings: object) -> object:
        given.append(settings)
        return attend(*arrays, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(ways, "pick_fastest", lambda _calls: 0)
    workload = make_workload(problem, inputs, threads=1)
    call = baseline.prepare(workload)._make_call(workload.w)
    call()

    assert baseline.implementation == "scaled_dot_product_attention, flash"
    assert given[-1]["attn_mask"] is None  # the only row sees all keys
    assert find_error(compute_expected(problem, inputs), workload.y) is None


def test_compositions_take_the_threads_that_openmp_has_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So one that is prepared while OpenMP has one thread is the form on one thread."""
    used: list[int | None] = []
    monkeypatch.setattr(OpenMp, "max_threads", lambda _openmp: 1)
    monkeypatch.setattr(
        AttentionLayer, "compute", lambda _layer, *arguments: used.append(arguments[-1])
    )
    problem = Problem.parse("attention f32 4x9x16 scale")
    inputs = make_inputs(problem, InputKind.NORMAL, seed=4)
    workload = make_workload(problem, inputs, threads=2)

    check = found("openblas-attention").prepare(workload)
    check.sample(WeightCopies(check, 1, seed=0).struct, warm_up_calls=0, timed_calls=1)

    assert used == [1]


def test_a_library_is_left_out_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(wheels, "version", missing)

    for name in ("openvino", "zentorch", "mkl", "torch"):
        with pytest.raises(BaselineMissing, match="is not installed"):
            found(f"{name}-attention")
        assert row_named(f"{name}-attention").installed() == []


@pytest.mark.parametrize("name", ["openvino-attention", "mkl-attention"])
def test_what_is_called_in_float32_refuses_other_types(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "version", lambda _name: "1.0")  # whether it is installed or not

    with pytest.raises(BaselineMissing, match="float32 only, not in bf16"):
        found(name).check_problem(Problem.parse("attention bf16 9x9x16 scale"))


def test_zentorch_is_left_out_where_it_calls_the_kernel_of_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem.parse("attention f32 9x9x16 scale")
    monkeypatch.setattr(wheels, "version", lambda _name: "1.0")  # whether it is installed or not
    cpu = detect_cpu()

    for isa, refuses in ((cpu.isa - {IsaFeature.AVX512F}, True), ({IsaFeature.AVX512F}, False)):
        here = replace(cpu, isa=frozenset(isa))
        monkeypatch.setattr(attention_zentorch, "detect_cpu", lambda here=here: here)
        with pytest.raises(BaselineMissing, match="AVX-512") if refuses else nullcontext():
            found("zentorch-attention").check_problem(problem)


def test_threads_share_the_rows_of_a_softmax() -> None:
    library = built_finish()
    assert library is not None
    threads, now = 3, [0]
    numbered = ctypes.CFUNCTYPE(ctypes.c_int)
    own_part = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    shared: list[int] = []

    def run_each(part: int, argument: int, _threads: int, _flags: int) -> None:
        for number in range(threads):
            now[0] = number
            shared.append(number)
            own_part(part)(argument)

    parallel = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    )(run_each)
    functions = (parallel, numbered(lambda: now[0]), numbered(lambda: threads))
    team = TeamStruct(*(ctypes.cast(one, ctypes.c_void_p) for one in functions))
    alone = np.random.default_rng(1).normal(size=(8, 21)).astype(np.float32)
    together = alone.copy()

    for scores, of_call in ((alone, TeamStruct()), (together, team)):
        call = SoftmaxStruct(8, 21, address_of(scores), 21, 0.5, None, 0, 14, of_call)
        library.softmax_rows(ctypes.byref(call))

    assert shared == [0, 1, 2]
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_allclose(together.sum(axis=1), 1.0, rtol=1e-6)
