"""Sentences on a verdict, for people."""

from gemm_tuner.domain.measurement import Raced
from gemm_tuner.domain.quorum import disagree, figures_of_leading
from gemm_tuner.domain.reason import instead_text, speed_text, why_not_served
from gemm_tuner.domain.verdict import Basis, Decision, Verdict
from gemm_tuner.trust.key_id import key_id_of


def measured_here(cpu_key: str) -> str:
    """Return the reason for the verdict of exactly the CPU that asks."""
    return f"exact: measured on {cpu_key}."


def sentences(verdict: Verdict, reason: str) -> tuple[str, ...]:
    """Return all that is told of a verdict which was found, one sentence each, after its reason."""
    told = (_say(verdict), *_tell_hosts(verdict), *_tell_baseline(verdict))
    return (f"{reason}{_tell_key(verdict)}", *told)


def _tell_key(verdict: Verdict) -> str:
    """Return a sentence on who attests the kernel, if one is named."""
    key = verdict.attested_by
    return "" if key is None else f" It is attested with the measuring key {key}."


def _tell_hosts(verdict: Verdict) -> tuple[str, ...]:
    """Return what each host found, where several measured or are to, and whether they disagree."""
    hosts = verdict.hosts
    told = [
        f"host {key_id_of(bytes.fromhex(one.key))}: {one.decision.value}, "
        f"{speed_text(one.ratio, one.baseline)}, with {one.candidate}."
        for one in hosts
    ]
    if disagree(hosts):
        told.insert(0, f"the {len(hosts)} hosts disagree; each one's own figure follows.")
    return tuple(told)


def quorum_text(verdict: Verdict) -> str:
    """Return how many hosts found what, of those that the quorum asks for; as a clause."""
    measured = figures_of_leading(verdict.hosts, verdict.quorum)
    tuned = sum(one.decision is Decision.TUNED for one in measured)
    what = "tuned" if tuned else "as fast as what runs instead"
    count = tuned or sum(one.would_serve for one in measured)
    if count >= verdict.quorum:
        return f"{what} on {count} hosts, but on none with exactly this CPU"
    return f"{what} on {count} of {verdict.quorum} hosts that the quorum asks for"


def _tell_baseline(verdict: Verdict) -> tuple[str, ...]:
    """Return by what the baseline computed, what it was chosen from, and what could not be raced.

    Nothing is told where it is not known by what the baseline computed.
    """
    measured = verdict.measurement
    if measured is None or not measured.implementation:
        return ()
    raced = [
        f"{one.baseline} ({one.call_ns / 1e3:.3g} µs)" for one in measured.raced if one.is_usable
    ]
    refused = [_why_not_raced(one) for one in measured.raced if not one.is_usable]
    told = f"the baseline: {measured.baseline}, by {measured.implementation}"
    return (f"{told}; {_how(verdict)}: {', '.join(raced)}." if raced else f"{told}.", *refused)


def _how(verdict: Verdict) -> str:
    """Return how libraries were raced; where weights are cold, older versions did so with hot."""
    assert verdict.measurement is not None
    is_alike = all(one.regime is verdict.context.regime for one in verdict.measurement.raced)
    return "raced" if is_alike else "raced with hot weights"


def _why_not_raced(library: Raced) -> str:
    """Return why a library was not timed; records of older versions do not say it."""
    reason = " ".join(library.reason.split()).removesuffix(".") or "the record does not say why"
    return f"not raced: {library.package}: {reason}."


def _say(verdict: Verdict) -> str:
    comparison = verdict.comparison
    if verdict.basis is Basis.PREDICTED:
        return f"{verdict.decision.value}: expected to be fast, not measured."
    if verdict.basis is Basis.SAME_MODEL:
        return f"{verdict.decision.value}: its speed over the baseline is not known here."
    if comparison is None:
        return f"{verdict.decision.value}: not measured for m = {verdict.problem.m.text}."
    why_not = quorum_text(verdict) if verdict.is_withheld else why_not_served(comparison)
    unserved = f"; no kernel is named, because {why_not}"
    return (
        f"{verdict.decision.value}: {speed_text(comparison.ratio)}{instead_text(comparison)}"
        f"{'' if verdict.artifact else unserved}"
        f"{'' if verdict.complete else '; the sweep did not come to its end'}."
    )
