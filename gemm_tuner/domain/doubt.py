"""Why a measurement is no evidence: something other than the kernel and its baseline decided it."""

from gemm_tuner.domain.measurement import Interference, Measurement, Rounds

DISTURBED = "disturbed"
IMPLAUSIBLE = "implausible"

# Of the rounds: the median does not mind fewer.
MOST_DISTURBED_ROUNDS = 0.25
# Of the fastest sample of whole models. A neighbour on the same core or on the memory takes up to
# half of the speed, and no counter of this machine shows it. Of 36 cases on a Zen 5 (November
# 2026), none had more than a quarter of such rounds in either of the ways that are compared.
SLOWED = 1.25
_MOST_STOLEN = 0.05
# Between the median of the ratios and the ratio of the fastest samples, either way. Of 3270
# published confirmations (2026-11-22, two CPUs), 97 % agree within a factor of 1.15.
_LARGEST_DISAGREEMENT = 1.25
# Of the baseline's plain call: offsets of x and scales may be more work than a pass over y.
_MOST_OVER_PLAIN = 2.0
_CALL_NS = 10_000.0  # of whatever does the epilogue


def why_disturbed(measurement: Measurement) -> str | None:
    """Return the evidence that other work disturbed a measurement, or None.

    Of several processes, one that was disturbed is enough: `tuned` needs all of them.
    """
    reasons = (_why_rounds_were_disturbed(rounds) for rounds in measurement.processes)
    reason = next(filter(None, reasons), None)
    return f"{DISTURBED}: {reason}" if reason else None


def why_doubted(measurement: Measurement) -> str | None:
    """Return why a measurement decides nothing, None if it may be believed."""
    reasons = (why_implausible(measurement), why_disturbed(measurement))
    return "; ".join(filter(None, reasons)) or None


def kind_of_doubt(reason: str) -> str:
    """Return the one word for a reason to doubt: `disturbed`, or `implausible`."""
    return reason.partition(":")[0]


def why_implausible(measurement: Measurement) -> str | None:
    """Return why neither the kernel nor the cost of a call explains a ratio, None if one may."""
    limits = measurement.limits
    if limits is None:
        return None
    kernel_ns, baseline_ns = measurement.candidate.median_ns, measurement.baseline_timing.median_ns
    if kernel_ns < limits.least_ns:
        return (
            f"{IMPLAUSIBLE}: a call takes {_time_text(kernel_ns)}, but its arithmetic and reading "
            f"alone take more than {_time_text(limits.least_ns)}"
        )
    if limits.plain_ns is None or limits.epilogue_ns is None:
        return None
    if baseline_ns > _MOST_OVER_PLAIN * limits.plain_ns + limits.epilogue_ns + _CALL_NS:
        return (
            f"{IMPLAUSIBLE}: {measurement.baseline} takes {_time_text(baseline_ns)} here and "
            f"{_time_text(limits.plain_ns)} without the epilogue: this baseline is not one that a "
            "user would accept"
        )
    return None


def _time_text(time_ns: float) -> str:
    return f"{time_ns / 1e3:.3g} µs" if time_ns < 1e6 else f"{time_ns / 1e6:.3g} ms"


def _why_rounds_were_disturbed(rounds: Rounds) -> str | None:
    if reason := why_interfered(rounds.interference):
        return reason
    ratio = rounds.ratio
    factor = ratio.median / ratio.of_minimums
    if max(factor, 1 / factor) > _LARGEST_DISAGREEMENT:
        return (
            f"the median of the rounds says {ratio.median:.3f} times the speed, "
            f"but the fastest samples say {ratio.of_minimums:.3f}"
        )
    return None


def why_interfered(interference: Interference | None) -> str | None:
    """Return what other work took from rounds, None if it is little or not known."""
    if interference is None:
        return None
    if interference.disturbed_rounds > MOST_DISTURBED_ROUNDS:
        return (
            f"in {interference.disturbed_rounds:.0%} of the rounds threads waited for a core, "
            f"while other processes kept {interference.others:.1f} cores busy"
        )
    if interference.stolen > _MOST_STOLEN:
        return f"the hypervisor gave {interference.stolen:.0%} of the time to other machines"
    return None
