"""The lookup for a range of m: a kernel tuned for a range that holds the m that was asked."""

from dataclasses import replace

from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.select.lookup import Lookup, Question, Source, stored


def bucket(question: Question) -> Lookup:
    """Look for the narrowest range of m measured on this CPU that holds the m of the problem.

    A range is timed at its greatest m. What was measured there is claimed for that m alone; for
    any other the kernel, if it was as fast as the baseline, is a tie without a ratio.
    """
    problem = question.problem
    is_from_trials = False
    for known in question.known.ranges:
        rows = known.m
        source = Source(problem=replace(problem, m=rows), cpu_key=question.cpu.exact_key)
        verdict, from_trials = stored(question, source, known, Basis.BUCKET)
        is_from_trials |= from_trials
        if verdict is None:
            continue
        reason = f"bucket: tuned for m = {rows.text}, measured at m = {rows.high}"
        if problem.m.high == rows.high:
            return Lookup(
                verdict=verdict,
                reason=f"{reason}.",
                source=source,
                from_trials=is_from_trials,
            )
        if verdict.artifact is not None:
            unmeasured = replace(verdict, decision=Decision.TIE, measurement=None)
            reason = f"{reason}, so its speed at m = {problem.m.text} is not known."
            return Lookup(verdict=unmeasured, reason=reason, from_trials=is_from_trials)
    reason = f"bucket: no kernel confirmed here for a range of m that holds {problem.m.text}."
    return Lookup(verdict=None, reason=reason, from_trials=is_from_trials)
