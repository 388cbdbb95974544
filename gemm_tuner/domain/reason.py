"""Why a verdict names a kernel or none, in words."""

from gemm_tuner.domain.comparison import SERVED_ABOVE, SERVED_FROM, Comparison, is_as_fast
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import CONFIDENCE, Ratio
from gemm_tuner.domain.units import context_text
from gemm_tuner.domain.verdict import Basis, Decision

LEAD_OF_WAITING = "another time its threads may wait longer than it leads by"


def speed_text(ratio: Ratio, baseline: str = "the baseline") -> str:
    """Return a speed with its interval: `1.21 times the speed of onednn 3.2 (95 % …)`."""
    return (
        f"{ratio.median:.3f} times the speed of {baseline} "
        f"({CONFIDENCE * 100:.0f} % interval {ratio.low:.3f} to {ratio.high:.3f})"
    )


def instead_text(comparison: Comparison) -> str:
    """Return how a kernel stands beside what runs instead, where its baseline cannot run there.

    It begins with a semicolon, and is empty where the baseline is what runs, or is not faster.
    Where the order of additions is fixed, it says that the baseline's is not.
    """
    if comparison.is_fixed:
        return f"; {comparison.baseline.text} promises no order of additions"
    if comparison.other is None or is_as_fast(comparison.ratio):
        return ""
    ratio, beside = comparison.ratio.median, comparison.beside_instead.median
    faster = f"is {1 / ratio:.2f} times as fast" if ratio < 1 else "may be as fast"
    return (
        f"; {comparison.baseline.text} {faster} but does not run in your process; this kernel is "
        f"{beside:.2f} times as fast as {comparison.other.text}, which would run instead"
    )


def why_not_served(comparison: Comparison) -> str:
    """Return why a kernel of this speed is not served."""
    beside = comparison.beside_instead
    if comparison.is_servable:
        return (
            'that was disturbed and decides nothing, or too few hosts found it: "gemm-tuner '
            'explain" tells which, and "gemm-tuner sweep" measures again'
        )
    if beside.median < SERVED_FROM:
        return f"a kernel is served from {SERVED_FROM:.3f} times on"
    return (
        f"a kernel is served only where the interval begins at {SERVED_ABOVE:.3f} or above, and "
        f"this one begins at {beside.low:.3f}"
    )


def used_instead(comparison: Comparison) -> str:
    """Return what is to be used where the kernel is not served."""
    if comparison.is_fixed:
        return "the fixed order in plain C"
    return comparison.other.text if comparison.other else "the baseline"


def reason_for(
    problem: str,
    cpu_key: str,
    context: ExecutionContext,
    *,
    decision: Decision,
    basis: Basis,
    comparison: Comparison | None,
    is_served: bool,
) -> str:
    """Return why a problem, by its text, gets the kernel that it gets, or none, as a sentence."""
    if basis is Basis.NONE:
        return (
            f"nothing was tuned for {problem!r} ({context_text(context)}) "
            f'on {cpu_key}; run "gemm-tuner sweep" on such a machine.'
        )
    if is_served and comparison is None:
        return f"{decision.value}, {basis.text}: its speed is not known here."
    if comparison is None:
        return f"no kernel for {problem!r} is shown to be as fast as the baseline."
    speed = f"{speed_text(comparison.ratio)}{instead_text(comparison)}"
    if is_served:
        return f"{decision.value}, {basis.text}: {speed}."
    return (
        f"{used_instead(comparison)} is to be used for {problem!r}: the best kernel has {speed}; "
        f"{why_not_served(comparison)}."
    )
