"""The words for why there is a kernel or none: each case has its own."""

import pytest

from gemm_tuner.domain.comparison import Comparison, Instead
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import Library, Ratio
from gemm_tuner.domain.reason import reason_for, why_not_served
from gemm_tuner.domain.verdict import Basis, Decision


def _compare(median: float, low: float, high: float) -> Comparison:
    ratio = Ratio(median=median, low=low, high=high, of_minimums=median)
    return Comparison(ratio=ratio, baseline=Library(text="onednn 3.2.0"))


def _compare_with_mkl(median: float, speed: float, low: float | None = None) -> Comparison:
    return Comparison(
        ratio=Ratio(median=median, low=low or median, high=median, of_minimums=median),
        baseline=Library(text="mkl 2026.0"),
        instead=Instead(library=Library(text="onednn 3.2.0"), speed=speed),
    )


@pytest.mark.parametrize(
    ("comparison", "reason"),
    [
        (_compare(1.075, 0.91, 1.2), "begins at 0.970 or above, and this one begins at 0.910"),
        (_compare(0.99, 0.98, 1.0), "a kernel is served from 1.000 times on"),
        (_compare(1.9, 1.8, 2.0), "was disturbed and decides nothing"),
        (_compare_with_mkl(0.8, 0.79, low=0.75), "this one begins at 0.949"),
    ],
)
def test_a_kernel_that_is_not_served_has_the_part_of_its_ratio_that_is_too_low(
    comparison: Comparison, reason: str
) -> None:
    assert reason in why_not_served(comparison)


def test_each_case_is_told_in_its_own_words() -> None:
    beside = _compare(1.075, 0.91, 1.2)
    cases = [
        (
            Decision.BASELINE,
            Basis.NONE,
            None,
            False,
            "nothing was tuned for 'p' (hot, 2 threads) on cpu",
        ),
        (Decision.TIE, Basis.MEASURED, beside, False, "the baseline is to be used for 'p'"),
        (Decision.TUNED, Basis.MEASURED, beside, True, "tuned, measured on this CPU: 1.075 times"),
        (Decision.TIE, Basis.PREDICTED, None, True, "its speed is not known here"),
    ]

    reasons = [
        reason_for(
            "p",
            "cpu",
            ExecutionContext(threads=2),
            decision=decision,
            basis=basis,
            comparison=one,
            is_served=is_served,
        )
        for decision, basis, one, is_served, _words in cases
    ]

    for (*_case, words), reason in zip(cases, reasons, strict=True):
        assert words in reason
        assert reason.endswith(".")
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize(
    ("comparison", "is_served", "words"),
    [
        (
            _compare_with_mkl(0.95, 0.73),
            True,
            (
                "; mkl 2026.0 is 1.05 times as fast but does not run in your process; this kernel "
                "is 1.30 times as fast as onednn 3.2.0, which would run instead."
            ),
        ),
        (
            _compare_with_mkl(1.01, 0.73, low=0.96),
            True,
            "; mkl 2026.0 may be as fast but does not run in your process; this kernel is 1.38 ",
        ),
        (_compare_with_mkl(1.1, 0.73), True, "(95 % interval 1.100 to 1.100)."),
        (
            _compare_with_mkl(0.7, 0.73),
            False,
            (
                "; this kernel is 0.96 times as fast as onednn 3.2.0, which would run instead; a "
                "kernel is served from 1.000 times on."
            ),
        ),
    ],
)
def test_what_would_run_instead_is_told_where_it_is_another_library(
    comparison: Comparison, words: str, *, is_served: bool
) -> None:
    reason = reason_for(
        "p",
        "cpu",
        ExecutionContext(),
        decision=Decision.BASELINE,
        basis=Basis.MEASURED,
        comparison=comparison,
        is_served=is_served,
    )

    assert words in reason
    assert reason.startswith("baseline, " if is_served else "onednn 3.2.0 is to be used")
