"""Claims for short calls: what threads may wait for each other another time wins nothing."""

from dataclasses import replace

import pytest
from samples import CONTEXT, CPU, PROBLEM, make_trial

from gemm_tuner.cli.reports.verdict_text import decision_text
from gemm_tuner.derive import decide_by, derive_verdict
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import Timing
from gemm_tuner.domain.reason import LEAD_OF_WAITING
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.verdict import Decision
from gemm_tuner.errors import InvalidRecord

TWO = ExecutionContext(threads=2)
TWO_PARTS = Candidate.parse("avx512_f32_8x48 mc128_nc768_kc256 jc_ic_jr_ir grid2x1")


def timed(ours_ns: int, theirs_ns: int, **changes: object) -> Trial:
    trial = make_trial(call_ns=ours_ns, context=TWO, candidate=TWO_PARTS)
    assert trial.measurement is not None
    baseline = Timing(calls_per_sample=10, samples_ns=(theirs_ns * 10,) * 12)
    measurement = replace(trial.measurement, baseline_timing=baseline)
    return replace(trial, measurement=measurement, **changes)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("ours_ns", "theirs_ns", "decision"),
    [
        (2_300, 2_500, Decision.TIE),  # called tuned once, and 0.81 times later
        (2_300, 3_300, Decision.TIE),
        (2_300, 3_500, Decision.TUNED),
        (10_000, 11_000, Decision.TIE),
        (100_000, 104_000, Decision.TUNED),
        (2_500, 2_300, Decision.BASELINE),
    ],
)
def test_threads_must_win_by_more_than_they_may_wait(
    ours_ns: int, theirs_ns: int, decision: Decision
) -> None:
    assert decide_by(timed(ours_ns, theirs_ns)) is decision


def test_a_kernel_of_one_part_waits_for_nobody() -> None:
    in_one = make_trial().candidate

    assert decide_by(timed(2_300, 2_500, candidate=in_one)) is Decision.TUNED
    assert decide_by(timed(2_300, 2_500, context=CONTEXT)) is Decision.TUNED


def test_a_tie_is_served_where_it_was_as_fast() -> None:
    verdict = derive_verdict(
        [timed(2_300, 2_500)],
        problem=PROBLEM,
        cpu_key=CPU.exact_key,
        context=TWO,
        complete=True,
    )

    assert verdict.decision is Decision.TIE
    assert verdict.artifact is not None
    assert LEAD_OF_WAITING in decision_text(verdict)


def test_another_tie_says_nothing_of_waiting() -> None:
    verdict = derive_verdict(
        [timed(2_300, 2_310)],
        problem=PROBLEM,
        cpu_key=CPU.exact_key,
        context=TWO,
        complete=True,
    )

    assert verdict.decision is Decision.TIE
    assert LEAD_OF_WAITING not in decision_text(verdict)


def test_a_trial_that_was_not_timed_decides_nothing() -> None:
    with pytest.raises(InvalidRecord, match="without a measurement"):
        decide_by(make_trial(measurement=None))
