"""What surrounded the measurement of a verdict: how noisy the machine was, and what else ran."""

from collections.abc import Iterable
from typing import Any

from gemm_tuner.domain.measurement import Interference, Measurement
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.verdict import Verdict


def trial_behind(verdict: Verdict, tried: Iterable[Trial]) -> Trial | None:
    """Return the trial that a verdict rests on, None if it is not among those given."""
    if verdict.tried_at is None:
        return None
    return next(
        (
            trial
            for trial in tried
            if (trial.created_at, trial.candidate) == (verdict.tried_at, verdict.candidate)
            and trial.context == verdict.context
        ),
        None,
    )


def conditions_lines(trial: Trial | None) -> tuple[str, ...]:
    """Return what is known of the noise in a measurement; nothing where there is none."""
    if trial is None or trial.conditions is None or trial.measurement is None:
        return ()
    conditions, interference = trial.conditions, _worst_interference(trial.measurement)
    processes = len(trial.measurement.processes)
    lines = [
        f"noise: {conditions.noise:.1%} (middle half of the baseline's samples, over their median)."
    ]
    if interference:
        lines.append(
            f"other work{_at_most(processes)}: {interference.disturbed_rounds:.0%} of the rounds "
            "disturbed, "
            f"{interference.others:.1f} cores busy with other processes, "
            f"{interference.stolen:.1%} of the time stolen."
        )
    lines.append(
        f"machine: huge pages {conditions.huge_pages}, Linux {conditions.kernel_release}, "
        f"microcode {conditions.microcode}, {conditions.peak_flop_per_s / 1e9:.0f} Gflop/s in one "
        "core beside it."
    )
    if conditions.topology:
        lines.append(f"usable there: {conditions.topology}.")
    if conditions.sandbox:
        lines.append(f"sandbox: {conditions.sandbox.value}.")
    return tuple(lines)


def conditions_facts(trial: Trial | None) -> dict[str, Any] | None:
    """Return the same as JSON facts, None where nothing is known."""
    if trial is None or trial.conditions is None or trial.measurement is None:
        return None
    conditions, interference = trial.conditions, _worst_interference(trial.measurement)
    return {
        "noise": conditions.noise,
        "disturbed_rounds": interference.disturbed_rounds if interference else None,
        "others": interference.others if interference else None,
        "stolen": interference.stolen if interference else None,
        "huge_pages": conditions.huge_pages,
        "kernel_release": conditions.kernel_release,
        "microcode": conditions.microcode,
        "topology": conditions.topology or None,
        "peak_flop_per_s": conditions.peak_flop_per_s,
        "sandbox": conditions.sandbox.value if conditions.sandbox else None,
    }


def _worst_interference(measurement: Measurement) -> Interference | None:
    """Return the most that other work did in any process of a measurement, None if not known."""
    found = [rounds.interference for rounds in measurement.processes]
    known = [one for one in found if one is not None]
    if not known:
        return None
    return Interference(
        disturbed_rounds=max(one.disturbed_rounds for one in known),
        stolen=max(one.stolen for one in known),
        others=max(one.others for one in known),
    )


def _at_most(processes: int) -> str:
    return f", at most, in {processes} processes" if processes > 1 else ""
