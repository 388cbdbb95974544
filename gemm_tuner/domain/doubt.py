"""Why a measurement is no evidence: something other than the kernel and its baseline decided it."""

from gemm_tuner.domain.measurement import Interference, Measurement

DISTURBED = "disturbed"

# Of the rounds: the median does not mind fewer.
_MOST_DISTURBED_ROUNDS = 0.25
_MOST_STOLEN = 0.05
# Between the median of the ratios and the ratio of the fastest samples, either way. Of 3270
# published confirmations (2026-11-22, two CPUs), 97 % agree within a factor of 1.15.
_LARGEST_DISAGREEMENT = 1.25


def why_disturbed(measurement: Measurement) -> str | None:
    """Return what shows that other work disturbed a measurement, None if nothing does."""
    reason = _why_interfered(measurement.interference)
    if reason is None:
        ratio = measurement.ratio
        factor = ratio.median / ratio.of_minimums
        if max(factor, 1 / factor) > _LARGEST_DISAGREEMENT:
            reason = (
                f"the median of the rounds says {ratio.median:.3f} times the speed, "
                f"but the fastest samples say {ratio.of_minimums:.3f}"
            )
    return f"{DISTURBED}: {reason}" if reason else None


def why_doubted(measurement: Measurement) -> str | None:
    """Return why a measurement decides nothing, None if it may be believed."""
    return why_disturbed(measurement)


def _why_interfered(interference: Interference | None) -> str | None:
    if interference is None:
        return None
    if interference.disturbed_rounds > _MOST_DISTURBED_ROUNDS:
        return (
            f"in {interference.disturbed_rounds:.0%} of the rounds threads waited for a core, "
            f"while other processes kept {interference.others:.1f} cores busy"
        )
    if interference.stolen > _MOST_STOLEN:
        return f"the hypervisor gave {interference.stolen:.0%} of the time to other machines"
    return None
