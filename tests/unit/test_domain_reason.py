"""The words for why there is a kernel or none: each case has its own."""

import pytest

from gemm_tuner.domain.measurement import Ratio
from gemm_tuner.domain.reason import reason_for, why_not_served
from gemm_tuner.domain.verdict import Basis, Decision


def _ratio(median: float, low: float, high: float) -> Ratio:
    return Ratio(median=median, low=low, high=high, of_minimums=median)


@pytest.mark.parametrize(
    ("ratio", "reason"),
    [
        (_ratio(1.075, 0.91, 1.2), "begins at 0.970 or above, and this one begins at 0.910"),
        (_ratio(0.99, 0.98, 1.0), "a kernel is served from 1.000 times on"),
        (_ratio(1.9, 1.8, 2.0), "was disturbed and decides nothing"),
    ],
)
def test_a_kernel_that_is_not_served_has_the_part_of_its_ratio_that_is_too_low(
    ratio: Ratio, reason: str
) -> None:
    assert reason in why_not_served(ratio)


def test_each_case_is_told_in_its_own_words() -> None:
    ratio = _ratio(1.075, 0.91, 1.2)
    cases = [
        (Decision.BASELINE, Basis.NONE, None, False, "nothing was tuned for 'p' on cpu"),
        (Decision.TIE, Basis.MEASURED, ratio, False, "the baseline is to be used for 'p'"),
        (Decision.TUNED, Basis.MEASURED, ratio, True, "tuned, basis measured: 1.075 times"),
        (Decision.TIE, Basis.PREDICTED, None, True, "its speed is not known here"),
    ]

    reasons = [
        reason_for("p", "cpu", decision=decision, basis=basis, ratio=known, is_served=is_served)
        for decision, basis, known, is_served, _words in cases
    ]

    for (*_case, words), reason in zip(cases, reasons, strict=True):
        assert words in reason
        assert reason.endswith(".")
    assert len(set(reasons)) == len(reasons)
