"""Which kernel answers a problem with a fixed order of additions, and which never does."""

from dataclasses import replace

import pytest
from samples import CONTEXT, CPU, PROBLEM, SIBLING_CPU, add_build, make_trial
from sqlalchemy import Engine

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.domain.problem import Problem, Reduction
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.errors import InvalidRecord
from gemm_tuner.select.choose import Match, choose
from gemm_tuner.select.price import price_of_fixed_order
from gemm_tuner.select.shared_weights import share
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database, writing

FIXED = replace(PROBLEM, reduction=Reduction.FIXED)
NARROW = Candidate.parse("avx512_f32_1x16 mc128_nc768_kc768 jc_ic_jr_ir")
DOT = Candidate.parse("avx512_f32_dot_1x1 mc128_nc768_kc768 jc_ic_jr_ir")


def ask(repository: Repository, problem: Problem, cpu: Cpu = CPU) -> Match:
    return choose(repository, problem, cpu=cpu, context=CONTEXT)


def test_a_slower_kernel_is_served_and_says_at_what_price(repository: Repository) -> None:
    fixed, free = add_build(repository, b"fixed"), add_build(repository, b"free")
    repository.add_trial(make_trial(problem=FIXED, call_ns=1250, artifact=fixed))

    match = ask(repository, FIXED)

    assert match.verdict.artifact is not None
    assert match.verdict.artifact.sha256 == fixed.sha256
    assert match.verdict.decision is Decision.BASELINE
    assert "; onednn 3.2.0 promises no order of additions" in match.explain[1]
    assert "0.800 times the speed" in match.explain[1]
    assert price_of_fixed_order(repository, match.verdict, CPU) is None

    repository.add_trial(make_trial(call_ns=625, nr=32, artifact=free))
    price = price_of_fixed_order(repository, match.verdict, CPU)

    assert price is not None
    assert price.text.startswith(
        "price of the fixed order: 0.500 times the speed of avx512_f32_8x32"
    )
    assert price_of_fixed_order(repository, ask(repository, PROBLEM).verdict, CPU) is None


@pytest.mark.parametrize(
    ("asked", "held"), [(FIXED, PROBLEM), (PROBLEM, FIXED)], ids=["fixed", "any"]
)
def test_a_kernel_of_the_other_class_never_answers(
    asked: Problem, held: Problem, repository: Repository
) -> None:
    """Not for this m, a range of m, another CPU of the class, or one with more features."""
    larger = replace(CPU, isa=CPU.isa | {IsaFeature.AVX512_BF16})
    for cpu in (CPU, SIBLING_CPU, larger):
        for rows in ("128", "1..256"):
            artifact = add_build(repository, f"{cpu.exact_key} {rows}".encode())
            problem = replace(held, m=Rows.parse(rows))
            repository.add_trial(make_trial(problem=problem, cpu=cpu, artifact=artifact))

    for cpu in (CPU, replace(CPU, stepping=3), replace(CPU, isa=CPU.isa - {IsaFeature.FMA})):
        for rows in ("128", "7", "1..256"):
            match = ask(repository, replace(asked, m=Rows.parse(rows)), cpu)
            assert match.verdict.artifact is None
            assert match.verdict.basis is Basis.NONE
    assert ask(repository, held).verdict.artifact is not None
    assert repository.exact_of(asked) == ()


def test_a_kernel_of_another_order_is_refused_and_never_served(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_trial(problem=FIXED, candidate=DOT, artifact=add_build(repository))

    with pytest.raises(InvalidRecord, match="is not kept: family avx512_f32_dot does not add in"):
        repository.add_trial(trial)
    assert repository.trials(problem=FIXED) == ()

    # A worker may write what it likes, with a key that is believed.
    monkeypatch.setattr("gemm_tuner.store.trials.why_in_another_order", lambda _trial: None)
    repository.add_trial(trial)
    refused = ask(repository, FIXED)
    assert refused.verdict.artifact is None
    said = [line for line in refused.explain if line.startswith("not served: 1 trial")]
    assert "since family avx512_f32_dot does not add in the fixed order" in "".join(said)
    assert not any(line.endswith("..") for line in said)
    repository.add_trial(replace(trial, problem=PROBLEM))
    assert ask(repository, PROBLEM).verdict.artifact is not None


def test_what_was_derived_before_the_order_counted_is_derived_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = Repository(engine)
    with monkeypatch.context() as former:
        for place in ("reading", "trials"):
            former.setattr(f"gemm_tuner.store.{place}.why_in_another_order", lambda _trial: None)
        repository.add_trial(
            make_trial(problem=FIXED, candidate=DOT, artifact=add_build(repository))
        )
        assert ask(repository, FIXED).verdict.artifact is not None
    with writing(engine).begin() as connection:
        connection.exec_driver_sql("UPDATE verdict_state SET rules = 5")

    opened = open_database(engine.url.render_as_string(hide_password=False))

    assert ask(Repository(opened), FIXED).verdict.artifact is None
    opened.dispose()


def test_a_library_for_a_fixed_range_is_kept_at_each_m_unless_it_adds_otherwise(
    repository: Repository,
) -> None:
    library = Candidate.parse(f"..8 {NARROW.text} | {NARROW.text}")
    for m in ("1..128", "8", "128"):
        problem = replace(FIXED, m=Rows.parse(m))
        repository.add_trial(make_trial(problem=problem, candidate=library))
        assert len(repository.trials(problem=problem)) == 1

    of_dot = Candidate.parse(f"..8 {DOT.text} | {DOT.text}")
    for m in ("1..128", "8"):
        problem = replace(FIXED, m=Rows.parse(m))
        with pytest.raises(InvalidRecord, match="avx512_f32_dot does not add in"):
            repository.add_trial(make_trial(problem=problem, candidate=of_dot))


def test_a_fixed_range_of_m_and_a_sibling_answer(repository: Repository) -> None:
    ranged = replace(FIXED, m=Rows.parse("1..256"))
    artifact = add_build(repository)
    repository.add_trial(make_trial(problem=ranged, call_ns=1250, artifact=artifact))
    repository.add_trial(
        make_trial(problem=FIXED, call_ns=1250, artifact=artifact, cpu=SIBLING_CPU)
    )

    bases = [ask(repository, replace(FIXED, m=Rows.parse(m))).verdict for m in ("7", "128")]

    assert [one.basis for one in bases] == [Basis.BUCKET, Basis.SIBLING]
    assert all(one.artifact is not None for one in bases)


def test_kernels_that_share_weights_keep_the_order(repository: Repository) -> None:
    problems = [replace(FIXED, m=Rows.parse(m)) for m in ("1", "128")]
    for problem in problems:
        for nr, call_ns in ((48, 1500), (32, 1490)):
            artifact = add_build(repository, f"{problem.text} {nr}".encode())
            trial = make_trial(problem=problem, nr=nr, call_ns=call_ns, artifact=artifact)
            repository.add_trial(trial)
            repository.add_trial(
                make_trial(problem=replace(problem, reduction=Reduction.ANY), nr=nr, call_ns=900)
            )

    sharing = share(repository, problems, cpu=CPU, context=CONTEXT)

    assert sharing.formats == ("f32 3072x768 panels nr32 kc256",)
    for problem, one in zip(problems, sharing.kernels, strict=True):
        assert one.chosen.verdict.problem == problem
        assert one.chosen.verdict.artifact is not None
