from dataclasses import replace

import pytest
from samples import (
    CONTEXT,
    CPU,
    PROBLEM,
    SIBLING_CPU,
    add_build,
    make_artifact,
    make_disturbed_trial,
    make_failed_trial,
    make_trial,
    make_trial_beside_mkl,
)

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, SweepEnd, Trial
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.select.choose import Match, choose
from gemm_tuner.space.ranking import ranked
from gemm_tuner.store.repository import Repository


def ask(
    repository: Repository,
    problem: Problem = PROBLEM,
    *,
    cpu: Cpu = CPU,
    context: ExecutionContext = CONTEXT,
) -> Match:
    return choose(repository, problem, cpu=cpu, context=context)


def test_an_exact_match_is_served(repository: Repository) -> None:
    artifact = add_build(repository)
    repository.add_trial(make_trial())

    match = ask(repository)

    assert match.verdict.basis is Basis.MEASURED
    assert match.verdict.artifact == artifact
    assert match.explain[0].startswith("exact: measured on")
    assert "1.250 times the speed" in match.explain[-1]


def test_a_kernel_slower_than_a_library_that_cannot_run_instead_is_served(
    repository: Repository,
) -> None:
    artifact = add_build(repository)
    repository.add_trial(make_trial_beside_mkl())

    match = ask(repository)

    assert (match.verdict.decision, match.verdict.artifact) == (Decision.BASELINE, artifact)
    assert any(
        "baseline: 0.952 times" in line
        and "mkl 2026.0 is 1.05 times as fast but does not run in your process; this kernel is "
        "1.30 times as fast as onednn 3.2.0, which would run instead"
        in line
        for line in match.explain
    )


def test_a_kernel_slower_than_what_can_run_instead_is_not_served(repository: Repository) -> None:
    add_build(repository)
    repository.add_trial(make_trial_beside_mkl(call_ns=1500))

    match = ask(repository)

    assert (match.verdict.decision, match.verdict.artifact) == (Decision.BASELINE, None)
    assert "this kernel is 0.91 times as fast as onednn 3.2.0" in match.explain[-1]
    assert "a kernel is served from 1.000 times on" in match.explain[-1]


def test_an_unfinished_sweep_is_marked(repository: Repository) -> None:
    add_build(repository)
    trial = make_trial()
    repository.add_trial(trial)

    assert not ask(repository).verdict.complete

    key = {"toolchain": trial.toolchain, "generator": trial.generator}
    spent = SweepEnd(baseline="onednn 3.2.0", is_exhausted=False, budget_s=30.0)
    repository.mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **key, end=spent)
    assert not ask(repository).verdict.complete

    other = SweepEnd(baseline="scalar_f32_1x1", is_exhausted=True, budget_s=30.0)
    repository.mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **key, end=other)
    assert not ask(repository).verdict.complete

    exhausted = SweepEnd(baseline="onednn 3.2.0", is_exhausted=True, budget_s=30.0)
    repository.mark_ended(PROBLEM, CPU.exact_key, CONTEXT, **key, end=exhausted)
    assert ask(repository).verdict.complete


def test_a_failure_in_any_stage_or_context_speaks_against_a_kernel(repository: Repository) -> None:
    add_build(repository)
    repository.add_trial(make_trial())
    cold = ExecutionContext(regime=Regime.COLD_WEIGHTS)
    repository.add_trial(replace(make_failed_trial(), stage=Stage.RACE, context=cold))

    assert ask(repository).verdict.basis is Basis.NONE


def test_trials_beside_different_baselines_are_not_compared(repository: Repository) -> None:
    add_build(repository)
    beside_onednn = make_trial(call_ns=100).measurement
    assert beside_onednn is not None
    beside_scalar = replace(beside_onednn, baseline="scalar_f32_1x1")
    repository.add_trial(make_trial(nr=32, measurement=beside_scalar))
    repository.add_trial(make_trial())

    assert ask(repository).verdict.candidate == make_trial().candidate


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


@pytest.mark.parametrize("rows", ["128", "1", "64..200"])
def test_a_tuned_range_claims_no_speed_for_an_m_that_was_not_timed(
    repository: Repository, rows: str
) -> None:
    add_build(repository)
    ranged = replace(PROBLEM, m=Rows.parse("1..256"))
    repository.add_trial(make_trial(problem=ranged))
    asked = replace(PROBLEM, m=Rows.parse(rows))

    match = ask(repository, asked)

    assert match.verdict.basis is Basis.BUCKET
    assert match.verdict.problem == asked
    assert match.verdict.decision is Decision.TIE
    assert match.verdict.ratio is None
    assert match.verdict.artifact is not None
    assert match.explain[2] == (
        "bucket: tuned for m = 1..256, measured at m = 256, "
        f"so its speed at m = {rows} is not known. "
        f"It is attested with the measuring key {match.verdict.attested_by}."
    )


@pytest.mark.parametrize("rows", ["256", "2..256"])
def test_a_tuned_range_answers_for_the_m_that_was_timed(repository: Repository, rows: str) -> None:
    add_build(repository)
    repository.add_trial(make_trial(problem=replace(PROBLEM, m=Rows.parse("1..256"))))

    match = ask(repository, replace(PROBLEM, m=Rows.parse(rows)))

    assert match.verdict.decision is Decision.TUNED
    assert match.verdict.ratio is not None
    assert match.explain[2] == (
        "bucket: tuned for m = 1..256, measured at m = 256. "
        f"It is attested with the measuring key {match.verdict.attested_by}."
    )


def test_a_tuned_range_that_lost_answers_for_no_other_m(repository: Repository) -> None:
    add_build(repository)
    ranged = replace(PROBLEM, m=Rows.parse("1..256"))
    repository.add_trial(make_trial(call_ns=1500, problem=ranged))

    assert ask(repository).verdict.basis is Basis.NONE


@pytest.mark.parametrize("rows", ["257", "0..5", "200..300"])
def test_a_tuned_range_does_not_answer_for_more(repository: Repository, rows: str) -> None:
    add_build(repository)
    repository.add_trial(make_trial(problem=replace(PROBLEM, m=Rows.parse("1..256"))))

    match = ask(repository, replace(PROBLEM, m=Rows.parse(rows)))

    assert match.verdict.basis is Basis.NONE


def test_the_narrowest_range_answers(repository: Repository) -> None:
    add_build(repository)
    for rows in ("1..4096", "64..256", "1..256"):
        repository.add_trial(make_trial(problem=replace(PROBLEM, m=Rows.parse(rows))))

    assert ask(repository).explain[2].startswith("bucket: tuned for m = 64..256, ")


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


def test_fewer_features_are_another_cpu() -> None:
    wider = replace(CPU, isa=CPU.isa | {IsaFeature.AVX512_VNNI})

    assert CPU.class_key != wider.class_key
    assert CPU.exact_key != wider.exact_key


def test_features_are_checked_beyond_the_key(repository: Repository) -> None:
    artifact = make_artifact(required_isa=frozenset({IsaFeature.AVX512_VNNI}))
    repository.add_build(artifact, binary=b"\x7fELF sample", source_text="// a kernel\n")
    repository.add_trial(make_trial(artifact=artifact))

    assert ask(repository).verdict.basis is Basis.NONE


def test_where_amx_is_not_usable_the_best_other_kernel_is_named(repository: Repository) -> None:
    with_amx = make_artifact(b"for AMX", required_isa=frozenset({IsaFeature.AMX_TILE}))
    repository.add_build(with_amx, binary=b"for AMX", source_text="// a kernel\n")
    repository.add_trial(make_trial(nr=32, artifact=with_amx, call_ns=100))
    add_build(repository)
    repository.add_trial(make_trial())

    assert ask(repository).verdict.candidate == make_trial().candidate


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
    assert match.explain[-2].startswith("imported: 1 record from")


def test_each_rung_is_explained(repository: Repository) -> None:
    match = ask(repository)

    steps = [line.partition(":")[0] for line in match.explain]
    assert steps == ["exact", "sibling", "bucket", "same_model", "predicted", "baseline"]


def make_prediction(repository: Repository, nr: int, **changes: object) -> Trial:
    """Keep a proof of a kernel that was chosen for the core of `CPU`, and not timed."""
    artifact = add_build(repository, f"kernel {nr}".encode())
    trial = replace(
        make_trial(nr=nr, stage=Stage.PREDICTED, measurement=None, conditions=None),
        cpu=replace(SIBLING_CPU, caches=replace(CPU.caches, l3_bytes=64 << 20)),
        artifact=artifact,
        **changes,  # type: ignore[arg-type]  # fields by name
    )
    repository.add_trial(trial)
    return trial


def test_a_cpu_without_measurements_gets_the_first_choice_of_the_model(
    repository: Repository,
) -> None:
    narrow, wide = make_prediction(repository, 16), make_prediction(repository, 48)
    order = ranked([narrow.candidate, wide.candidate], PROBLEM, CPU)

    match = ask(repository)

    assert match.verdict.candidate == order[0] == wide.candidate
    assert match.verdict.artifact == wide.artifact
    assert match.verdict.decision is Decision.TIE
    assert match.verdict.basis is Basis.PREDICTED
    assert match.verdict.ratio is None
    assert "predicted: the model's first of 2 kernels" in match.explain[-2]
    assert match.explain[-1] == "tie: expected to be fast, not measured."


def test_what_was_measured_goes_before_what_was_predicted(repository: Repository) -> None:
    make_prediction(repository, 16)
    measured = make_trial(artifact=add_build(repository))
    repository.add_trial(measured)

    assert ask(repository).verdict.candidate == measured.candidate


def test_no_prediction_is_served_that_cannot_run_here_or_failed_here(
    repository: Repository,
) -> None:
    failing, other = make_prediction(repository, 48), make_prediction(repository, 16)
    repository.add_trial(
        replace(make_failed_trial(), candidate=failing.candidate, artifact=failing.artifact)
    )

    assert ask(repository).verdict.candidate == other.candidate
    assert ask(repository, cpu=replace(CPU, isa=frozenset())).verdict.artifact is None
    assert ask(repository, cpu=replace(CPU, family=25)).verdict.artifact is None
    assert ask(repository, context=ExecutionContext(threads=2)).verdict.artifact is None
    cold = ask(repository, context=ExecutionContext(regime=Regime.COLD_WEIGHTS))
    assert cold.verdict.candidate == other.candidate


def test_a_prediction_of_the_newest_generator_counts_and_failures_are_of_builds(
    repository: Repository,
) -> None:
    make_prediction(repository, 48)
    repository.add_trial(replace(make_failed_trial(), artifact=make_artifact(b"wrong")))
    assert ask(repository).verdict.candidate is not None

    newer = make_prediction(repository, 16, generator="0.2.0-bbbb")
    assert ask(repository).verdict.candidate == newer.candidate


def test_a_prediction_that_hung_is_not_named_and_no_proof_against_others(
    repository: Repository,
) -> None:
    hung = make_prediction(repository, 48, outcome=Outcome.HUNG)
    assert ask(repository).verdict.artifact is None

    make_prediction(repository, 48)
    assert ask(repository).verdict.candidate == hung.candidate


def test_a_disturbed_measurement_is_not_served_and_hides_nothing(repository: Repository) -> None:
    add_build(repository)
    repository.add_trial(make_disturbed_trial())

    match = choose(repository, PROBLEM, cpu=CPU, context=CONTEXT)

    assert match.verdict.artifact is None
    assert match.verdict.doubt is not None
    assert any("not believed: disturbed: in 90%" in step for step in match.explain)
    assert 'run "gemm-tuner sweep" again' in match.explain[-1]

    repository.add_trial(make_trial(generator="0.0.9-older", minute=-5))

    assert choose(repository, PROBLEM, cpu=CPU, context=CONTEXT).verdict.decision is Decision.TUNED


@pytest.mark.parametrize(
    ("threads", "usable_cpus", "is_served"),
    [
        (16, None, False),  # an old record, of 2 cores
        (2, None, True),
        (16, 8, False),
        (16, 16, True),
        (4, 4, True),  # two hyper-threads on each core
    ],
)
def test_a_verdict_of_more_threads_than_cpus_is_not_served(
    threads: int, usable_cpus: int | None, *, is_served: bool, repository: Repository
) -> None:
    context = ExecutionContext(threads=threads)
    artifact = add_build(repository)
    repository.add_trial(make_trial(context=context, usable_cpus=usable_cpus, artifact=artifact))

    match = ask(repository, context=context)

    assert (match.verdict.artifact is not None) is is_served
    told = f"1 candidate was timed with {threads} threads where fewer CPUs were usable"
    assert any(told in reason for reason in match.explain) is not is_served
