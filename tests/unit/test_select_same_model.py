"""A CPU of which less may be used than where its model was measured, as when AMX is refused."""

from dataclasses import replace

from samples import CONTEXT, CPU, PROBLEM, add_build, make_artifact, make_failed_trial, make_trial

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu, IsaFeature
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.select.choose import Match, choose
from gemm_tuner.store.repository import Repository

AMX = frozenset({IsaFeature.AMX_TILE, IsaFeature.AMX_BF16})
WITH_AMX = replace(CPU, isa=CPU.isa | AMX)


def ask(repository: Repository, cpu: Cpu = CPU, context: ExecutionContext = CONTEXT) -> Match:
    return choose(repository, PROBLEM, cpu=cpu, context=context)


def keep(
    repository: Repository, nr: int, call_ns: int, *, cpu: Cpu = WITH_AMX, **changes: object
) -> Trial:
    """Keep a kernel with its time on a CPU, which need not have come to the final."""
    artifact = add_build(repository, f"kernel {nr}".encode())
    trial = replace(
        make_trial(nr=nr, call_ns=call_ns, cpu=cpu, stage=Stage.RACE),
        artifact=artifact,
        **changes,  # type: ignore[arg-type]  # fields by name
    )
    repository.add_trial(trial)
    return trial


def keep_amx_kernel(repository: Repository, call_ns: int) -> None:
    binary = b"for AMX"
    artifact = make_artifact(binary, required_isa=AMX)
    repository.add_build(artifact, binary=binary, source_text="// a kernel\n")
    repository.add_trial(make_trial(nr=64, call_ns=call_ns, cpu=WITH_AMX, artifact=artifact))


def test_where_amx_is_refused_the_fastest_other_kernel_is_named(repository: Repository) -> None:
    keep_amx_kernel(repository, call_ns=100)
    keep(repository, 16, call_ns=1500)
    fastest = keep(repository, 32, call_ns=1200)

    match = ask(repository)

    assert match.verdict.candidate == fastest.candidate
    assert match.verdict.artifact == fastest.artifact
    assert match.verdict.basis is Basis.SAME_MODEL
    assert match.verdict.decision is Decision.TIE
    assert match.verdict.ratio is None
    assert match.verdict.cpu_key == CPU.exact_key
    assert match.explain[-2].startswith("same_model: the fastest of 2 kernels that can run here")
    assert match.explain[-1] == "tie: its speed over the baseline is not known here."


def test_where_amx_is_usable_its_kernel_is_named(repository: Repository) -> None:
    keep_amx_kernel(repository, call_ns=100)
    keep(repository, 16, call_ns=1500)

    verdict = ask(repository, WITH_AMX).verdict

    assert verdict.basis is Basis.MEASURED
    assert verdict.artifact is not None
    assert verdict.artifact.required_isa == AMX


def test_what_was_measured_here_goes_before(repository: Repository) -> None:
    keep(repository, 16, call_ns=100)
    here = keep(repository, 32, call_ns=900, cpu=CPU, stage=Stage.CONFIRM)

    verdict = ask(repository).verdict

    assert verdict.candidate == here.candidate
    assert verdict.basis is Basis.MEASURED


def test_nothing_is_named_that_cannot_run_here_or_is_not_of_this_question(
    repository: Repository,
) -> None:
    keep_amx_kernel(repository, call_ns=100)
    assert ask(repository).verdict.basis is Basis.NONE

    keep(repository, 16, call_ns=900)
    cold = ExecutionContext(regime=Regime.COLD_WEIGHTS)
    assert ask(repository, context=cold).verdict.basis is Basis.NONE
    assert ask(repository, replace(CPU, model=CPU.model + 1)).verdict.basis is Basis.NONE
    # Of the model 2, not 0x20.
    assert ask(repository, replace(CPU, model=0x20)).verdict.basis is Basis.NONE
    other = replace(CPU, isa=CPU.isa | {IsaFeature.AVX512_FP16})
    assert ask(repository, other).verdict.basis is Basis.NONE
    assert ask(repository).verdict.basis is Basis.SAME_MODEL


def test_a_kernel_that_failed_on_the_model_is_not_named(repository: Repository) -> None:
    failing = keep(repository, 16, call_ns=100)
    other = keep(repository, 32, call_ns=900)
    failure = replace(make_failed_trial(), candidate=failing.candidate, artifact=failing.artifact)
    repository.add_trial(replace(failure, outcome=Outcome.WRONG))

    assert ask(repository).verdict.candidate == other.candidate


def test_the_newest_generator_counts_and_lost_binaries_do_not(repository: Repository) -> None:
    keep(repository, 16, call_ns=100)
    newer = keep(repository, 32, call_ns=900, generator="0.2.0-bbbb")
    lost = make_trial(
        nr=64, call_ns=50, cpu=WITH_AMX, generator="0.3.0-cccc", artifact=make_artifact(b"lost")
    )
    repository.add_trial(lost)

    assert ask(repository).verdict.candidate == newer.candidate
