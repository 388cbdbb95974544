"""The figures of a verdict that its row repeats in columns, for pages that tell of many."""

from collections.abc import Iterable
from enum import StrEnum
from math import exp, log
from typing import Any, Self

from gemm_tuner.derive import SCALAR
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.verdict import Decision, Verdict


class Standing(StrEnum):
    """How a kernel stands beside its baseline, as pages count it."""

    TUNED = Decision.TUNED.value
    TIE = Decision.TIE.value
    BASELINE = Decision.BASELINE.value
    ALONE = "no library"  # the baseline is a plain loop: there is nothing to claim
    DOUBTED = "not believed"  # the measurement decides nothing

    @classmethod
    def of(cls, decision: Decision, *, baseline: str, doubt: str | None) -> Self:
        """Return how a kernel stands by its decision, beside which baseline, with what doubt."""
        if doubt:
            return cls(cls.DOUBTED)
        return cls(cls.ALONE if baseline.startswith(SCALAR) else decision.value)


_MOST_LOG = 700.0  # of what can be raised to e; a damaged row may hold more


def ratio_of(log_ratio: float) -> float:
    """Return the ratio with this logarithm."""
    return exp(min(max(log_ratio, -_MOST_LOG), _MOST_LOG))


def shape_columns(problem: Problem, layer: str) -> dict[str, Any]:
    """Return the columns of what is asked; `layer` is shared by problems that differ in m alone."""
    return {"layer": layer, "types": problem.types.text, "weights": problem.n * problem.k}


def figure_columns(verdict: Verdict | None, trials: Iterable[Trial]) -> dict[str, Any]:
    """Return the columns of a verdict that follows from `trials`; empty ones where there is none.

    The share of the peak is that of the trial that it rests on.
    """
    measured = verdict.measurement if verdict else None
    if verdict is None or measured is None:
        return dict.fromkeys(("standing", "log_ratio", "peak_share", "call_ns"))
    call_ns, problem = measured.candidate_median_ns, verdict.problem
    shares = (
        trial.conditions.share_of_peak(
            problem.flop(problem.m.high), call_ns, verdict.context.threads
        )
        for trial in trials
        if trial.conditions is not None
        and trial.candidate == verdict.candidate
        and trial.created_at == verdict.tried_at
    )
    return {
        "standing": Standing.of(
            verdict.decision, baseline=measured.baseline, doubt=verdict.doubt
        ).value,
        "log_ratio": log(measured.ratio.median),
        "peak_share": next(shares, None),
        "call_ns": call_ns,
    }
