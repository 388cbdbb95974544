"""A verdict as a line for people."""

from gemm_tuner.domain.measurement import CONFIDENCE, Ratio
from gemm_tuner.domain.reason import LEAD_OF_WAITING, instead_text, used_instead, why_not_served
from gemm_tuner.domain.verdict import Verdict


def interval_text(ratio: Ratio) -> str:
    """Return the interval of a ratio: `95 % interval 1.19 to 1.23`."""
    return f"{CONFIDENCE * 100:.0f} % interval {ratio.low:.3f} to {ratio.high:.3f}"


def decision_text(verdict: Verdict) -> str:
    """Return the decision with what it rests on, as one line."""
    measurement, comparison = verdict.measurement, verdict.comparison
    if measurement is None or comparison is None:
        return f"{verdict.decision.value}: nothing was measured for this problem"
    ratio = measurement.ratio
    if verdict.doubt is not None:
        return (
            f"{verdict.decision.value}: nothing is decided, and the baseline is to be used: "
            f"{verdict.doubt} (beside {measurement.baseline}: {ratio.median:.3f} times its speed, "
            f"{interval_text(ratio)}); a further sweep measures it anew"
        )
    unserved = f"; {used_instead(comparison)} is to be used: {why_not_served(comparison)}"
    waiting = f"; {LEAD_OF_WAITING}" if verdict.is_lead_of_waiting else ""
    line = (
        f"{verdict.decision.value}: {ratio.median:.3f} times the speed of {measurement.baseline} "
        f"({interval_text(ratio)}{waiting}), {verdict.basis.text}"
        f"{instead_text(comparison)}{'' if verdict.artifact else unserved}"
    )
    return line if verdict.complete else f"{line}; the search was cut short"
