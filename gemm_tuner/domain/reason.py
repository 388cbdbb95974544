"""Why a verdict names a kernel or none, in words."""

from gemm_tuner.domain.measurement import CONFIDENCE, Ratio
from gemm_tuner.domain.verdict import SERVED_ABOVE, SERVED_FROM, Basis, Decision, is_as_fast


def speed_text(ratio: Ratio, baseline: str = "the baseline") -> str:
    """Return a speed with its interval: `1.21 times the speed of onednn 3.2 (95 % …)`."""
    return (
        f"{ratio.median:.3f} times the speed of {baseline} "
        f"({CONFIDENCE * 100:.0f} % interval {ratio.low:.3f} to {ratio.high:.3f})"
    )


def why_not_served(ratio: Ratio) -> str:
    """Return why a kernel with this ratio is not served."""
    if is_as_fast(ratio):
        return 'that was disturbed and decides nothing; run "gemm-tuner sweep" again'
    if ratio.median < SERVED_FROM:
        return f"a kernel is served from {SERVED_FROM:.3f} times on"
    return (
        f"a kernel is served only where the interval begins at {SERVED_ABOVE:.3f} or above, and "
        f"this one begins at {ratio.low:.3f}"
    )


def reason_for(
    problem: str,
    cpu_key: str,
    *,
    decision: Decision,
    basis: Basis,
    ratio: Ratio | None,
    is_served: bool,
) -> str:
    """Return why a problem, by its text, gets the kernel that it gets, or none, as a sentence."""
    if basis is Basis.NONE:
        return (
            f'nothing was tuned for {problem!r} on {cpu_key}; run "gemm-tuner sweep" on such a '
            "machine."
        )
    if is_served and ratio is None:
        return f"{decision.value}, basis {basis.value}: its speed is not known here."
    if ratio is None:
        return f"no kernel for {problem!r} is shown to be as fast as the baseline."
    if is_served:
        return f"{decision.value}, basis {basis.value}: {speed_text(ratio)}."
    return (
        f"the baseline is to be used for {problem!r}: the best kernel has {speed_text(ratio)}; "
        f"{why_not_served(ratio)}."
    )
