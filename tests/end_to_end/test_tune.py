"""`gemm_tuner.tune`: from a problem to a called kernel, with no server."""

from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
from planted_times import plant_speeds

import gemm_tuner
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.verdict import Decision
from gemm_tuner.errors import InvalidEpilogue, InvalidProblem, InvalidSetting, NotEnoughCpus
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel

PROBLEM = "f32 1..12x33x20 nk bias+gelu_erf+add"


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_tune_returns_a_kernel_that_computes_the_layer(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(2.0))
    random = np.random.default_rng(7)
    x = random.standard_normal((9, 20), np.float32)
    w = random.standard_normal((33, 20), np.float32)
    bias = random.standard_normal(33, np.float32)
    residual = random.standard_normal((9, 33), np.float32)
    url = f"sqlite:///{tmp_path}/records.sqlite3"

    tuned = gemm_tuner.tune(PROBLEM, threads=threads, budget_s=1, db_url=url)
    y = tuned.kernel(x, tuned.kernel.pack(w), bias=bias, add=residual)

    value = x.astype(np.float64) @ w.T + bias
    gelu = value * (1 + np.tanh(np.sqrt(2 / np.pi) * (value + 0.044715 * value**3))) / 2
    assert isinstance(tuned.kernel, Kernel)
    assert tuned.kernel.threads == threads
    assert tuned.finalists
    # The two gelus differ by less than 5e-4 everywhere.
    np.testing.assert_allclose(y, gelu + residual, atol=1e-3)


def test_the_baseline_computes_where_it_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_speeds(monkeypatch, repeat(0.5))
    url = f"sqlite:///{tmp_path}/records.sqlite3"

    tuned = gemm_tuner.tune(PROBLEM, budget_s=1, db_url=url)

    assert tuned.verdict.comparison is not None
    compared = tuned.verdict.comparison.baseline
    assert isinstance(tuned.kernel, FallbackKernel)
    assert f"The comparison was with {compared.text}" in tuned.kernel.reason
    assert compared.is_version_of(tuned.kernel.library) or "instead" in tuned.kernel.reason


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"problem": "f32 1x2x3 nk gellu"}, InvalidEpilogue),
        ({"problem": "f32 0x2x3"}, InvalidProblem),
        ({"problem": "f32 1x2x3", "threads": 0}, InvalidSetting),
        ({"problem": "f32 1x2x3", "regime": "both"}, InvalidSetting),
        ({"problem": "f32 1x2x3", "regime": "warm"}, InvalidSetting),
        ({"problem": "f32 1x2x3", "budget_s": 0}, InvalidSetting),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, object], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        gemm_tuner.tune(**arguments, db_url=f"sqlite:///{tmp_path}/r.sqlite3")  # type: ignore[arg-type] # on purpose


def test_tune_refuses_more_threads_than_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gemm_tuner.machine.cpus.usable_cpus", lambda: 2)

    with pytest.raises(NotEnoughCpus, match="16 threads cannot be timed here"):
        gemm_tuner.tune(PROBLEM, threads=16, db_url=f"sqlite:///{tmp_path}/r.sqlite3")


@pytest.mark.proof
def test_tune_again_measures_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/records.sqlite3"
    plant_speeds(monkeypatch, repeat(2.0))
    gemm_tuner.tune(PROBLEM, budget_s=1, db_url=url)
    plant_speeds(monkeypatch, repeat(0.5))
    recalled = gemm_tuner.tune(PROBLEM, budget_s=1, db_url=url)

    renewed = gemm_tuner.tune(PROBLEM, budget_s=1, again=True, db_url=url)

    assert recalled.verdict.decision is Decision.TUNED
    assert renewed.verdict.decision is Decision.BASELINE
    assert "has 0.500 times the speed of the baseline" in renewed.kernel.reason


@pytest.mark.proof
@pytest.mark.skipif(
    not detect_cpu().isa >= {IsaFeature.AVX2, IsaFeature.FMA}, reason="the CPU has no AVX2"
)
def test_kernels_with_a_fixed_order_are_served_and_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 12 rows, and for one row alone, by kernels that are slower than the baseline."""
    random = np.random.default_rng(7)
    x = random.standard_normal((12, 20), np.float32)
    w = random.standard_normal((33, 20), np.float32)
    given = {
        "bias": random.standard_normal(33, np.float32),
        "add": random.standard_normal((12, 33), np.float32),
    }
    results, candidates = [], set()
    for rows in (12, 1):
        plant_speeds(monkeypatch, repeat(0.5))
        tuned = gemm_tuner.tune(
            f"f32 {rows}x33x20 nk bias+gelu_erf+add fixed",
            budget_s=1,
            db_url=f"sqlite:///{tmp_path}/records.sqlite3",
        )
        assert isinstance(tuned.kernel, Kernel)
        assert tuned.verdict.candidate is not None
        candidates.add(tuned.verdict.candidate.text)
        packed, bias, add = tuned.kernel.pack(w), given["bias"], given["add"]
        first_rows = range(0, 12, rows)
        pieces = [
            tuned.kernel(x[one : one + rows], packed, bias=bias, add=add[one : one + rows])
            for one in first_rows
        ]
        results.append(np.concatenate([np.asarray(piece) for piece in pieces]).tobytes())

    assert len(candidates) == 2
    assert len(set(results)) == 1
