"""A kernel stands beside the fastest library, and is served beside what runs instead."""

from dataclasses import replace

import pytest

from gemm_tuner.domain.comparison import Comparison, InProcess
from gemm_tuner.domain.measurement import Library, Raced, Ratio
from gemm_tuner.libraries import choose

MKL = Raced(package="mkl 2026.0.0", baseline="mkl 2026.0", call_ns=100.0)
ONNX = Raced(package="onnxruntime 1.31.1", baseline="onnxruntime 1.31.1", call_ns=110.0)
ONEDNN = Raced(package="onednn-cpu-gomp 2023.2", baseline="onednn 3.2.0", call_ns=130.0)
OPENBLAS = Raced(package="numpy 2.4.6", baseline="openblas 0.3.31 + pass", call_ns=125.0)
REFUSED = Raced(package="onednn 2026.1", baseline="", call_ns=0.0, reason="crashed")


def _compare(median: float, baseline: str, *raced: Raced, low: float | None = None) -> Comparison:
    ratio = Ratio(median=median, low=low or median, high=median, of_minimums=median)
    return Comparison.of(ratio, baseline, raced)


@pytest.mark.parametrize(
    ("baseline", "raced", "instead", "speed"),
    [
        ("onednn 3.2.0", (ONEDNN, OPENBLAS), ONEDNN, 1.0),
        (
            "onednn 3.2.0 + pass",
            (),
            Raced(package="", baseline="onednn 3.2.0 + pass", call_ns=1),
            1,
        ),
        ("mkl 2026.0", (MKL, ONEDNN, REFUSED), ONEDNN, 100 / 130),
        ("mkl 2026.0", (MKL, ONNX, ONEDNN, OPENBLAS), OPENBLAS, 100 / 125),
        ("onnxruntime 1.31.1", (ONNX, ONEDNN), ONEDNN, 110 / 130),
    ],
)
def test_what_runs_instead_is_the_fastest_of_the_race_that_can(
    baseline: str, raced: tuple[Raced, ...], instead: Raced, speed: float
) -> None:
    found = _compare(1.0, baseline, *raced).instead

    assert found is not None
    assert found.library == Library(text=instead.baseline, package=instead.package)
    assert found.speed == pytest.approx(speed)


@pytest.mark.parametrize(
    ("median", "baseline", "raced", "is_served"),
    [
        (0.95, "mkl 2026.0", (MKL, ONEDNN), True),  # 1.235 times as fast as oneDNN
        (0.76, "mkl 2026.0", (MKL, ONEDNN), False),  # 0.988 times
        (0.95, "onednn 3.2.0", (ONEDNN, OPENBLAS), False),
        (0.95, "mkl 2026.0", (MKL, REFUSED), False),  # nothing else was timed
        (1.01, "mkl 2026.0", (MKL, REFUSED), True),
        (0.95, "mkl 2026.0", (), False),
        (0.95, "torch 2.9.1", (MKL, ONEDNN), False),  # it took no part
        (0.95, "scalar avx2", (), False),
    ],
)
def test_a_kernel_is_served_beside_what_runs_instead(
    median: float, baseline: str, raced: tuple[Raced, ...], *, is_served: bool
) -> None:
    assert _compare(median, baseline, *raced).is_servable is is_served


@pytest.mark.parametrize(
    ("median", "low", "baseline", "is_behind"),
    [
        (0.95, 0.95, "mkl 2026.0", True),
        (1.01, 0.96, "mkl 2026.0 + pass", True),
        (1.01, 1.0, "mkl 2026.0", False),
        (0.95, 0.95, "onednn 3.2.0", False),
        (0.95, 0.95, "mkl-attention 2026.0", False),
    ],
)
def test_a_kernel_may_be_behind_a_library_that_only_some_callers_have(
    median: float, low: float, baseline: str, *, is_behind: bool
) -> None:
    comparison = _compare(median, baseline, MKL, ONEDNN, low=low)

    assert comparison.is_behind(["mkl"]) is is_behind
    assert not comparison.is_behind([])
    assert not replace(comparison, is_fixed=True).is_behind(["mkl"])


def test_the_interval_counts_beside_what_runs_instead() -> None:
    assert not _compare(0.80, "mkl 2026.0", MKL, ONEDNN, low=0.74).is_servable
    assert _compare(0.80, "mkl 2026.0", MKL, ONEDNN, low=0.75).is_servable


@pytest.mark.parametrize(
    ("text", "baseline", "raced"),
    [
        ("package 0", "onednn 3.13.0", ("onednn 3.13.0", "onednn 3.2.0")),
        ("package 1", "onednn 3.2.0 + pass", ("openblas 0.3.31", "onednn 3.2.0")),
        ("", "mkl 2026.2.0", ("onednn 3.2.0",)),
        ("", "mkl 2026.2.0", ()),
    ],
)
def test_the_baseline_has_the_package_that_was_raced(
    text: str, baseline: str, raced: tuple[str, ...]
) -> None:
    took_part = [
        Raced(package=f"package {place}", baseline=one, call_ns=1.0 + place)
        for place, one in enumerate(raced)
    ]

    comparison = _compare(1.0, baseline, *took_part)

    assert comparison.baseline == Library(text=baseline, package=text)


def test_each_library_that_can_run_has_a_layer() -> None:
    assert list(choose._ROWS) == list(InProcess)
