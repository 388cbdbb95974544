from dataclasses import replace

import pytest
from samples import (
    CONTEXT,
    CPU,
    PROBLEM,
    SIBLING_CPU,
    add_build,
    make_artifact,
    make_failed_trial,
    make_trial,
)

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.domain.measurement import Measurement, Timing
from gemm_tuner.domain.problem import Problem, Rows
from gemm_tuner.domain.record import Stage, SweepEnd, Trial
from gemm_tuner.domain.verdict import Basis, Decision, Verdict
from gemm_tuner.select.choose import Match, choose
from gemm_tuner.select.derive import derive_verdict
from gemm_tuner.store.repository import Repository


def ask(
    repository: Repository,
    problem: Problem = PROBLEM,
    *,
    cpu: Cpu = CPU,
    context: ExecutionContext = CONTEXT,
) -> Match:
    return choose(repository, problem, cpu=cpu, context=context)


def derive(*trials: Trial) -> Verdict:
    return derive_verdict(
        trials, problem=PROBLEM, cpu_key=CPU.exact_key, context=CONTEXT, complete=True
    )


def test_the_fastest_correct_final_trial_wins() -> None:
    verdict = derive(
        make_trial(call_ns=800, nr=48),
        make_trial(call_ns=700, nr=32),
        make_trial(call_ns=100, nr=16, stage=Stage.RACE),
        make_failed_trial(),
    )

    assert verdict.candidate == make_trial(nr=32).candidate
    assert verdict.decision is Decision.TUNED
    assert verdict.basis is Basis.MEASURED
    assert verdict.ratio is not None
    assert verdict.ratio.median == pytest.approx(1000 / 700)


def test_the_latest_trial_of_a_candidate_counts() -> None:
    verdict = derive(
        make_trial(call_ns=700, nr=32), make_trial(call_ns=800), make_trial(call_ns=900, nr=32)
    )

    assert verdict.candidate == make_trial().candidate


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


def test_an_exact_match_is_served(repository: Repository) -> None:
    artifact = add_build(repository)
    repository.add_trial(make_trial())

    match = ask(repository)

    assert match.verdict.basis is Basis.MEASURED
    assert match.verdict.artifact == artifact
    assert match.explain[0].startswith("exact: measured on")
    assert "1.250 times the speed" in match.explain[-1]


def test_an_unfinished_sweep_is_marked(repository: Repository) -> None:
    add_build(repository)
    trial = make_trial()
    repository.add_trial(trial)

    assert not ask(repository).verdict.complete

    key = {"toolchain": trial.toolchain, "generator": trial.generator}
    spent = SweepEnd(is_exhausted=False, budget_s=30.0)
    repository.mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **key, end=spent)
    assert not ask(repository).verdict.complete

    exhausted = SweepEnd(is_exhausted=True, budget_s=30.0)
    repository.mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **key, end=exhausted)
    assert ask(repository).verdict.complete


def test_another_context_is_not_an_answer(repository: Repository) -> None:
    add_build(repository)
    repository.add_trial(make_trial())

    for context in (ExecutionContext(threads=2), ExecutionContext(regime=Regime.COLD_WEIGHTS)):
        assert ask(repository, context=context).verdict.basis is Basis.NONE


def test_a_sibling_is_served_as_stale(repository: Repository) -> None:
    artifact = add_build(repository)
    repository.add_trial(make_trial(cpu=SIBLING_CPU))

    match = ask(repository)

    assert match.verdict.basis is Basis.SIBLING
    assert match.verdict.artifact == artifact
    assert match.verdict.cpu_key == CPU.exact_key
    assert "stale" in match.explain[1]


def test_the_exact_cpu_comes_before_a_sibling(repository: Repository) -> None:
    add_build(repository)
    repository.add_trial(make_trial(call_ns=900))
    repository.add_trial(make_trial(call_ns=500, cpu=SIBLING_CPU))

    assert ask(repository).verdict.basis is Basis.MEASURED


@pytest.mark.parametrize("rows", ["128", "1", "64..200", "2..256"])
def test_a_tuned_range_of_m_answers_for_what_it_holds(repository: Repository, rows: str) -> None:
    add_build(repository)
    ranged = replace(PROBLEM, m=Rows.parse("1..256"))
    repository.add_trial(make_trial(problem=ranged))
    asked = replace(PROBLEM, m=Rows.parse(rows))

    match = ask(repository, asked)

    assert match.verdict.basis is Basis.BUCKET
    assert match.verdict.problem == asked
    assert match.explain[2] == "bucket: measured for m = 1..256."


@pytest.mark.parametrize("rows", ["257", "0", "200..300"])
def test_a_tuned_range_does_not_answer_for_more(repository: Repository, rows: str) -> None:
    add_build(repository)
    repository.add_trial(make_trial(problem=replace(PROBLEM, m=Rows.parse("1..256"))))

    match = ask(repository, replace(PROBLEM, m=Rows.parse(rows)))

    assert match.verdict.basis is Basis.NONE


def test_the_narrowest_range_answers(repository: Repository) -> None:
    add_build(repository)
    for rows in ("1..4096", "64..256", "1..256"):
        repository.add_trial(make_trial(problem=replace(PROBLEM, m=Rows.parse(rows))))

    assert ask(repository).explain[2] == "bucket: measured for m = 64..256."


def test_the_newest_generator_answers_first(repository: Repository) -> None:
    add_build(repository)
    repository.add_trial(make_trial(call_ns=500, generator="0.1.0-aaaa"))
    repository.add_trial(make_trial(call_ns=800, nr=32, generator="0.2.0-bbbb"))

    assert ask(repository).verdict.candidate == make_trial(nr=32).candidate


def test_an_older_generator_answers_when_the_newest_has_nothing(repository: Repository) -> None:
    add_build(repository)
    lost = make_artifact(b"not in the store")
    repository.add_trial(make_trial(generator="0.1.0-aaaa"))
    repository.add_trial(make_trial(nr=32, generator="0.2.0-bbbb", artifact=lost))

    assert ask(repository).verdict.candidate == make_trial().candidate


def test_a_kernel_is_not_served_without_its_features(repository: Repository) -> None:
    add_build(repository)
    repository.add_trial(make_trial(cpu=replace(CPU, isa=CPU.isa | {IsaFeature.AVX512F})))
    without = replace(CPU, isa=frozenset({IsaFeature.FMA, IsaFeature.AVX2}))

    assert ask(repository, cpu=without).verdict.basis is Basis.NONE


def test_features_are_checked_beyond_the_key(repository: Repository) -> None:
    artifact = make_artifact(required_isa=frozenset({IsaFeature.AVX512_VNNI}))
    repository.add_build(artifact, binary=b"\x7fELF sample", source_text="// a kernel\n")
    wider = replace(CPU, isa=CPU.isa | {IsaFeature.AVX512_VNNI})
    repository.add_trial(make_trial(cpu=wider, artifact=artifact))

    assert CPU.exact_key == wider.exact_key
    assert ask(repository, cpu=wider).verdict.basis is Basis.MEASURED
    assert ask(repository, cpu=CPU).verdict.basis is Basis.NONE


def test_a_kernel_whose_binary_is_lost_is_not_named(repository: Repository) -> None:
    repository.add_trial(make_trial())

    assert ask(repository).verdict.basis is Basis.NONE


def test_a_faster_baseline_needs_no_binary(repository: Repository) -> None:
    repository.add_trial(make_trial(call_ns=1500))

    verdict = ask(repository).verdict

    assert (verdict.decision, verdict.basis) == (Decision.BASELINE, Basis.MEASURED)
    assert verdict.artifact is None


def test_imported_records_are_mentioned_but_not_served(repository: Repository) -> None:
    add_build(repository)
    repository.add_imported([make_trial()])

    match = ask(repository)

    assert match.verdict.basis is Basis.NONE
    assert match.explain[-2].startswith("imported: 1 records")


def test_each_rung_is_explained(repository: Repository) -> None:
    match = ask(repository)

    steps = [line.partition(":")[0] for line in match.explain]
    assert steps == ["exact", "sibling", "bucket", "baseline"]
