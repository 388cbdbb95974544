"""What a database tells of the times of calls; skipped where PyTorch is not installed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.measurement import Raced
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

from samples import (  # noqa: E402
    CONTEXT,
    SOURCE_TEXT,
    make_artifact,
    make_disturbed_trial,
    make_trial,
    make_trial_beside_mkl,
)
from torch_kernels import kernel_of  # noqa: E402 - after PyTorch was found

from gemm_tuner.layers.sources import StoredKernels  # noqa: E402
from gemm_tuner.layers.wanted import CallTime, WantedLayer, WantedProduct  # noqa: E402

WANTED = WantedLayer(n=17, k=24, rows=(6,), dtype="f32", epilogue="bias", threads=1)


def _keep(url: str, problem: Problem, trial: Trial, regime: Regime = Regime.HOT) -> None:
    """Keep a trial of a kernel for a problem."""
    repository = Repository(open_database(url))
    kernel = kernel_of(problem, 1)
    artifact = replace(kernel.artifact, source_sha256=make_artifact().source_sha256)
    repository.add_build(artifact, binary=kernel.native.binary, source_text=SOURCE_TEXT)
    here = replace(trial, problem=problem, cpu=detect_cpu(), candidate=kernel.candidate)
    context = replace(CONTEXT, regime=regime)
    repository.add_trial(replace(here, artifact=artifact, context=context))


@pytest.mark.parametrize(
    ("m", "trial", "time_ns"),
    [
        (6, make_trial(call_ns=800), 800.0),
        (6, make_trial(call_ns=1250), 1000.0),  # that of the library
        (6, make_disturbed_trial(call_ns=800), None),
        ("1..64", make_trial(call_ns=800), None),  # timed with another m
        (7, make_trial(call_ns=800), None),
    ],
)
def test_times_of_calls_are_those_of_the_very_problem(
    tmp_path: Path, m: int | str, trial: Trial, time_ns: float | None
) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    problem = Problem.create(m, WANTED.n, WANTED.k, dtype="f32", epilogue="bias")
    _keep(url, problem, trial)

    found = StoredKernels(url).find(WANTED)

    expected = None if time_ns is None else CallTime(least_ns=time_ns, greatest_ns=time_ns)
    assert found.times == (expected,)
    assert found.regime is (Regime.COLD_WEIGHTS if m == 7 else Regime.HOT)  # asked for first
    assert bool(found.kernels) is (time_ns == 800 or m == "1..64")


@pytest.mark.parametrize(
    ("call_ns", "beside", "time_ns"),
    [
        (1050, (), 1050.0),  # oneDNN, which would run instead, takes 1365 ns
        (1050, ("mkl",), 1000.0),
        (950, ("mkl",), 950.0),
        (1050, ("openvino",), 1050.0),
    ],
)
def test_a_kernel_behind_what_its_caller_would_run_is_left(
    tmp_path: Path, call_ns: int, beside: tuple[str, ...], time_ns: float
) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    for operation in ("linear", "matmul"):
        problem = Problem.create(6, 17, 24, dtype="f32", epilogue="bias", operation=operation)
        _keep(url, problem, make_trial_beside_mkl(call_ns=call_ns))
    asked: dict[str, Any] = {
        "n": 17,
        "k": 24,
        "rows": (6,),
        "dtype": "f32",
        "epilogue": "bias",
        "threads": 1,
    }

    layer = StoredKernels(url).find(WantedLayer(**asked, beside=beside))
    product = StoredKernels(url).find(WantedProduct(**asked, beside=beside))

    is_left = time_ns == 1000
    assert layer.times == (CallTime(least_ns=time_ns, greatest_ns=time_ns),)
    for found in (layer, product):
        assert bool(found.kernels) is not is_left
        assert any("0.952 times the speed of mkl 2026.0" in one for one in found.reasons) is is_left
    choices = StoredKernels(url).choices(WantedLayer(**asked, beside=beside))
    assert any(one.kernels for one in choices)  # a model may find it faster


@pytest.mark.parametrize(
    ("m", "hot", "is_taken"),
    [
        (6, make_trial_beside_mkl(call_ns=950), True),
        (6, make_trial_beside_mkl(call_ns=1050), False),
        ("1..64", make_trial(call_ns=800), False),  # timed with another m
    ],
)
def test_a_hot_kernel_stands_in_for_one_that_was_left_if_it_was_compared(
    tmp_path: Path, m: int | str, hot: Trial, *, is_taken: bool
) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    cold = Problem.create(6, WANTED.n, WANTED.k, dtype="f32", epilogue="bias")
    _keep(url, cold, make_trial_beside_mkl(call_ns=1050), Regime.COLD_WEIGHTS)
    _keep(url, Problem.create(m, WANTED.n, WANTED.k, dtype="f32", epilogue="bias"), hot)

    assert not StoredKernels(url).find(WANTED).reasons  # oneDNN would run instead

    found = StoredKernels(url).find(replace(WANTED, beside=("mkl",)))
    assert bool(found.kernels) is is_taken
    assert found.regime is (Regime.HOT if is_taken else Regime.COLD_WEIGHTS)


@pytest.mark.parametrize("steps", ["scale", "scale+causal"])
def test_a_verdict_for_attention_is_found_for_its_own_scores(tmp_path: Path, steps: str) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    _keep(url, Problem.parse("attention f32 17x17x24 scale+causal"), make_trial(call_ns=800))
    wanted = WantedProduct(
        n=17, k=24, rows=(17,), dtype="f32", epilogue=steps, threads=1, operation="attention"
    )

    found = StoredKernels(url).find(wanted)

    assert len(found.kernels) == (steps == "scale+causal")
    assert {one.problem for one in found.kernels} <= set(wanted.problems)
    assert bool(found.reasons) is (steps == "scale")


@pytest.mark.parametrize(("beside", "saved_ns"), [((), 200.0), (("mkl",), 2200.0)])
def test_a_kernel_saves_the_time_of_what_runs_in_its_place(
    tmp_path: Path, beside: tuple[str, ...], saved_ns: float
) -> None:
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    trial = make_trial(call_ns=800)
    assert trial.measurement is not None
    raced = (
        Raced(package="onednn-cpu-gomp 2023.2.0", baseline="onednn 3.2.0", call_ns=1000.0),
        Raced(package="mkl 2026.0.0", baseline="mkl 2026.0", call_ns=3000.0),
    )
    trial = replace(trial, measurement=replace(trial.measurement, raced=raced))
    _keep(url, Problem.parse("matmul f32 6x17x24 nk none"), trial)
    wanted = WantedProduct(
        n=17, k=24, rows=(6,), dtype="f32", epilogue="none", threads=1, beside=beside
    )

    assert StoredKernels(url).find(wanted).saved_ns == saved_ns
