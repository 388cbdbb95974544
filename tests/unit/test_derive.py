"""What a verdict is, given the trials of a problem: by rank, doubt and plausible limits."""

from dataclasses import replace

import pytest
from samples import (
    CONTEXT,
    CPU,
    PROBLEM,
    make_disturbed_trial,
    make_failed_trial,
    make_trial,
)

from gemm_tuner.derive import derive_verdict
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.evidence import Evidence
from gemm_tuner.domain.measurement import Interference, Limits, Measurement, Timing
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Stage, Trial
from gemm_tuner.domain.verdict import Basis, Decision, Verdict
from gemm_tuner.select.sturdiest import sturdiest_of_fastest


def derive(*trials: Trial) -> Verdict:
    return derive_verdict(
        trials, problem=PROBLEM, cpu_key=CPU.exact_key, context=CONTEXT, complete=True
    )


@pytest.mark.parametrize(("call_ns", "counts"), [(880, True), (900, False)])
def test_several_kernels_for_a_range_count_before_one_for_the_greatest_m(
    call_ns: int,
    counts: bool,  # noqa: FBT001 - a parameter of a test
) -> None:
    one = make_trial(call_ns=800)
    several = Candidate.parse(f"..9 {one.candidate.text} | {one.candidate.text}")

    verdict = derive(one, make_trial(call_ns=call_ns, candidate=several))

    assert verdict.candidate == (several if counts else one.candidate)


def test_the_fastest_confirmed_trial_wins() -> None:
    verdict = derive(
        make_trial(call_ns=800, nr=48),
        make_trial(call_ns=700, nr=32),
        make_trial(call_ns=100, nr=16, stage=Stage.RACE),
        make_trial(call_ns=100, nr=64, stage=Stage.FINAL),
    )

    assert verdict.candidate == make_trial(nr=32).candidate
    assert verdict.decision is Decision.TUNED
    assert verdict.basis is Basis.MEASURED
    assert verdict.ratio is not None
    assert verdict.ratio.median == pytest.approx(1000 / 700)


@pytest.mark.parametrize(
    ("least_ns", "other_ns", "wins"),
    [
        (980, 985, "other"),  # about as fast, and shown to be faster than the library
        (980, 1005, "first"),  # no more shown than of the first
        (960, 996, "first"),  # slower by more than rounds of their own may be apart
    ],
)
def test_of_kernels_that_are_about_as_fast_one_that_may_be_served_wins(
    least_ns: int, other_ns: int, wins: str
) -> None:
    first, other = make_trial(nr=32), make_trial(nr=48, call_ns=other_ns)
    assert first.measurement is not None
    samples = Timing(calls_per_sample=10, samples_ns=(10 * least_ns, *[10_200] * 11))
    behind = replace(first, measurement=replace(first.measurement, candidate=samples))

    verdict = derive(behind, other)

    assert verdict.candidate == (other if wins == "other" else first).candidate
    assert (verdict.artifact is not None) == (wins == "other")


def test_the_latest_trial_of_a_candidate_counts() -> None:
    verdict = derive(
        make_trial(call_ns=700, nr=32), make_trial(call_ns=800), make_trial(call_ns=900, nr=32)
    )

    assert verdict.candidate == make_trial().candidate


@pytest.mark.parametrize(
    ("call_ns", "baseline_ns", "wins"),
    [
        (856, 1070, True),  # a slow clock
        (920, 1150, False),  # slower by more than its baseline makes up for
        (900, 1400, True),
        (900, 1130, False),  # the baseline was disturbed
    ],
)
def test_kernels_of_different_rounds_are_ranked_by_ratio_and_time_together(
    call_ns: int, baseline_ns: int, *, wins: bool
) -> None:
    measurement = Measurement(
        candidate=Timing(calls_per_sample=10, samples_ns=(10 * call_ns,) * 12),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=10, samples_ns=(10 * baseline_ns,) * 12),
    )

    verdict = derive(make_trial(measurement=measurement), make_trial(call_ns=830, nr=32))

    assert (verdict.candidate == make_trial().candidate) == wins


def test_a_kernel_that_failed_after_it_was_confirmed_is_not_named() -> None:
    verdict = derive(make_trial(call_ns=700), make_trial(call_ns=800, nr=32), make_failed_trial())

    assert verdict.candidate == make_trial(nr=32).candidate


def test_a_kernel_that_was_confirmed_after_it_failed_is_named() -> None:
    assert derive(make_failed_trial(), make_trial()).candidate == make_trial().candidate


def test_the_simplest_of_equally_fast_candidates_is_chosen() -> None:
    plain = Candidate.parse("avx512_f32_8x32 mc128_nc768_kc256 jc_ic_jr_ir")
    prefetching = Candidate.parse("avx512_f32_8x32 mc128_nc768_kc256 jc_ic_jr_ir pf4096")

    assert sturdiest_of_fastest({prefetching: 1.209, plain: 1.2}, PROBLEM) == plain
    assert sturdiest_of_fastest({prefetching: 1.23, plain: 1.2}, PROBLEM) == prefetching


def test_of_equally_fast_candidates_the_one_with_fewer_loads_is_chosen() -> None:
    low = Candidate.parse("avx512_bf16_4x64 mc128_nc768_kc256 jc_ic_jr_ir")
    tall = Candidate.parse("avx512_bf16_6x64 mc128_nc768_kc256 jc_ic_jr_ir pf4096")

    assert sturdiest_of_fastest({low: 1.012, tall: 1.005}, PROBLEM) == tall
    assert sturdiest_of_fastest({low: 1.03, tall: 1.005}, PROBLEM) == low


def test_rows_that_a_problem_does_not_have_save_no_loads() -> None:
    wide = Candidate.parse("avx512_f32_4x96 mc4_nc768_kc256 jc_ic_jr_ir")
    tall = Candidate.parse("avx512_f32_8x48 mc8_nc768_kc256 jc_ic_jr_ir")
    one_row = Problem.parse("f32 1x3072x768 nk none")

    assert sturdiest_of_fastest({wide: 1.0, tall: 1.0}, PROBLEM) == wide
    assert sturdiest_of_fastest({wide: 1.0, tall: 1.0}, one_row) == wide
    assert sturdiest_of_fastest({wide: 1.0, tall: 1.0}, Problem.parse("f32 9x48x9 nk none")) == tall


def test_of_equally_fast_candidates_one_thread_is_enough() -> None:
    alone = Candidate.parse("avx512_f32_8x16 mc128_nc768_kc256 jc_ic_jr_ir")
    shared = Candidate.parse("avx512_f32_8x48 mc128_nc768_kc256 jc_ic_jr_ir grid1x2")

    assert sturdiest_of_fastest({alone: 1.0, shared: 1.0}, PROBLEM) == alone


def test_equal_times_give_the_same_answer_in_any_order() -> None:
    trials = [make_trial(nr=32), make_trial(nr=48)]

    assert derive(*trials).candidate == derive(*reversed(trials)).candidate


@pytest.mark.parametrize(
    ("call_ns", "decision", "has_artifact"),
    [
        (900, Decision.TUNED, True),
        (1000, Decision.TIE, True),
        (990, Decision.TIE, True),
        (1100, Decision.BASELINE, False),
    ],
)
def test_only_a_kernel_that_is_not_slower_is_named(
    call_ns: int, decision: Decision, *, has_artifact: bool
) -> None:
    verdict = derive(make_trial(call_ns=call_ns))

    assert verdict.decision is decision
    assert (verdict.artifact is not None) is has_artifact
    assert verdict.measurement is not None


def test_to_be_faster_than_our_own_scalar_loop_is_no_claim() -> None:
    trial = make_trial(call_ns=100)
    assert trial.measurement is not None
    beside_scalar = replace(trial.measurement, baseline="scalar 0123456789ab")

    verdict = derive(replace(trial, measurement=beside_scalar))

    assert verdict.decision is Decision.TIE
    assert verdict.artifact is not None


def test_a_tie_whose_kernel_may_be_slower_names_no_kernel() -> None:
    samples = (10_000,) * 5 + (11_000,) * 7
    measurement = Measurement(
        candidate=Timing(calls_per_sample=10, samples_ns=samples),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=10, samples_ns=(10_000,) * 12),
    )

    verdict = derive(make_trial(measurement=measurement))

    assert verdict.decision is Decision.TIE
    assert verdict.artifact is None


def test_a_wide_interval_is_a_tie() -> None:
    samples = (8000, 12_000) * 6
    measurement = Measurement(
        candidate=Timing(calls_per_sample=10, samples_ns=samples),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=10, samples_ns=(10_000,) * 12),
    )

    assert derive(make_trial(measurement=measurement)).decision is Decision.TIE


@pytest.mark.parametrize("trials", [(), (make_failed_trial(),), (make_trial(stage=Stage.RACE),)])
def test_nothing_measured_is_the_baseline(trials: tuple[Trial, ...]) -> None:
    verdict = derive(*trials)

    assert (verdict.decision, verdict.basis) == (Decision.BASELINE, Basis.NONE)
    assert not verdict.complete


def test_a_disturbed_measurement_decides_nothing() -> None:
    verdict = derive(make_disturbed_trial())

    assert verdict.decision is Decision.TIE
    assert verdict.artifact is None
    assert not verdict.complete
    assert verdict.doubt is not None
    assert "in 90% of the rounds threads waited for a core" in verdict.doubt
    assert "other processes kept 1.5 cores busy" in verdict.doubt


@pytest.mark.parametrize("disturbed_first", [True, False])
def test_what_was_measured_in_peace_goes_before_what_was_disturbed(
    *, disturbed_first: bool
) -> None:
    minutes = (0, 1) if disturbed_first else (1, 0)
    trials = [
        make_disturbed_trial(minute=minutes[0]),
        make_disturbed_trial(nr=32, minute=minutes[0]),
        make_trial(minute=minutes[1]),
    ]

    verdict = derive(*sorted(trials, key=lambda trial: trial.created_at))

    assert verdict.decision is Decision.TUNED
    assert verdict.candidate == trials[-1].candidate
    assert trials[-1].measurement is not None
    assert verdict.measurement == Evidence.of(trials[-1].measurement)


def test_time_that_the_hypervisor_took_is_a_disturbance() -> None:
    trial = make_trial()
    assert trial.measurement is not None
    stolen = Interference(disturbed_rounds=0.0, stolen=0.2, others=0.0)

    verdict = derive(replace(trial, measurement=replace(trial.measurement, interference=stolen)))

    assert verdict.doubt == "disturbed: the hypervisor gave 20% of the time to other machines"


def test_a_median_that_the_fastest_samples_contradict_decides_nothing() -> None:
    measurement = Measurement(
        candidate=Timing(calls_per_sample=1, samples_ns=(500,) * 12),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=1, samples_ns=(264, *(935,) * 11)),
    )

    verdict = derive(make_trial(measurement=measurement))

    assert verdict.decision is Decision.TIE
    assert verdict.doubt == (
        "disturbed: the median of the rounds says 1.870 times the speed, but the fastest samples "
        "say 0.528"
    )


def limited(*, call_ns: int, baseline_ns: int, limits: Limits) -> Verdict:
    measurement = Measurement(
        candidate=Timing(calls_per_sample=1, samples_ns=(call_ns,) * 12),
        baseline="onednn 3.2.0",
        baseline_timing=Timing(calls_per_sample=1, samples_ns=(baseline_ns,) * 12),
        limits=limits,
    )
    return derive(make_trial(measurement=measurement))


def test_a_baseline_that_is_far_below_its_plain_speed_is_no_yardstick() -> None:
    limits = Limits(least_ns=4_000, plain_ns=100_000, epilogue_ns=20_000)

    verdict = limited(call_ns=9_000, baseline_ns=27_000_000, limits=limits)

    assert verdict.decision is Decision.TIE
    assert verdict.artifact is None
    assert verdict.doubt == (
        "implausible: onednn 3.2.0 takes 27 ms here and 100 µs without the epilogue: "
        "this baseline is not one that a user would accept"
    )


def test_a_kernel_above_the_roof_is_not_believed() -> None:
    verdict = limited(call_ns=900, baseline_ns=2_000, limits=Limits(least_ns=1_000))

    assert verdict.decision is Decision.TIE
    assert verdict.doubt == (
        "implausible: a call takes 0.9 µs, but its arithmetic and reading alone take more than 1 µs"
    )


@pytest.mark.parametrize(
    "limits",
    [
        Limits(least_ns=10),  # the cost of a call of a library, without an epilogue
        Limits(least_ns=10, plain_ns=5_000, epilogue_ns=100),
        Limits(least_ns=10, plain_ns=600, epilogue_ns=10),  # a second call costs as much
        Limits(least_ns=10, plain_ns=1_000, epilogue_ns=40_000),  # an epilogue that is most work
    ],
)
def test_a_large_ratio_that_the_cost_of_a_call_or_an_epilogue_explains_is_claimed(
    limits: Limits,
) -> None:
    verdict = limited(call_ns=250, baseline_ns=5_500, limits=limits)

    assert verdict.decision is Decision.TUNED
    assert verdict.artifact is not None
