"""Candidates that crash, hang, write out of bounds or are wrong, in the middle of a real sweep."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from saboteur import PLANTED, Saboteur

from gemm_tuner.build.compile import Build, compile_kernels
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.cli.main import run
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source
from gemm_tuner.domain.verdict import Decision, decide
from gemm_tuner.errors import CompilationFailed, CompilationInterrupted
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.space.candidates import Space
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.strategies.local_search import LocalSearch
from gemm_tuner.strategies.table import Plan
from gemm_tuner.tuning.attempt import Render
from gemm_tuner.tuning.result import SweepResult
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep

PROBLEM = Problem.parse("f32 9x33x20 nk bias+relu")


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/records.sqlite3"


@pytest.fixture
def repository(database: str) -> Repository:
    return Repository(open_database(database))


def first_batch() -> list[Candidate]:
    """Return the candidates that a sweep tries first."""
    return list(LocalSearch(Space(problem=PROBLEM, cpu=detect_cpu())).propose({}).candidates)


def sweep_first_batch(repository: Repository, render: Render = render) -> SweepResult:
    """Sweep the candidates that come first, however long it takes."""
    (result,) = sweep(
        PROBLEM,
        contexts=[ExecutionContext()],
        cpu=detect_cpu(),
        repository=repository,
        settings=SweepSettings(toolchain=find_toolchain(), budget_s=600.0, render=render),
        on_progress=lambda _progress: None,
        is_stopped=lambda: False,
        chosen=first_batch(),
    )
    return result


def test_each_failure_is_recorded_and_the_sweep_goes_on(repository: Repository) -> None:
    saboteur = Saboteur(first_batch())

    result = sweep_first_batch(repository, saboteur)

    recorded = {trial.candidate: trial for trial in repository.trials(problem=PROBLEM)}
    for candidate, outcome in saboteur.plan.items():
        assert recorded[candidate].outcome is outcome, recorded[candidate].detail
        assert recorded[candidate].detail
        assert recorded[candidate].measurement is None
    assert result.failed == len(PLANTED)
    assert result.verdict.ratio is not None
    assert result.verdict.decision is decide(result.verdict.ratio)
    assert result.verdict.candidate in {trial.candidate for trial in result.finalists}
    assert not saboteur.plan.keys() & {trial.candidate for trial in result.finalists}


@pytest.mark.proof
def test_explain_tells_each_failure(
    database: str, repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    saboteur = Saboteur(first_batch())
    sweep_first_batch(repository, saboteur)

    run(["explain", "9", "33", "20", "--epilogue", "bias+relu", "--db", database])

    told = capsys.readouterr().out
    for candidate, outcome in saboteur.plan.items():
        assert f"{outcome.value}: {candidate.text}\n    " in told
    assert "return missing_name;" in told


def test_a_killed_compiler_is_no_failure_of_its_candidate(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = first_batch()

    def compile_but_one(
        sources: Sequence[tuple[Source, frozenset[IsaFeature]]], *, toolchain: Toolchain
    ) -> list[Build | CompilationFailed | CompilationInterrupted]:
        builds = compile_kernels(sources, toolchain=toolchain)
        if not sources:  # all were compiled before
            return builds
        return [CompilationInterrupted("the compiler was killed."), *builds[1:]]

    monkeypatch.setattr("gemm_tuner.tuning.attempt.compile_kernels", compile_but_one)
    sweep_first_batch(repository)

    tried = {trial.candidate for trial in repository.trials(problem=PROBLEM)}
    assert first[0] not in tried
    assert first[1] in tried


@pytest.mark.proof
def test_known_failures_are_not_tried_again_unless_they_hung(repository: Repository) -> None:
    saboteur = Saboteur(first_batch())

    sweep_first_batch(repository, saboteur)
    before = len(repository.trials(problem=PROBLEM))
    sweep_first_batch(repository)

    trials = repository.trials(problem=PROBLEM)
    assert before > 0
    assert len(trials) > before
    for victim, outcome in saboteur.plan.items():
        outcomes = [trial.outcome for trial in trials if trial.candidate == victim]
        assert outcomes[0] is outcome
        assert (Outcome.CORRECT in outcomes) is (outcome is Outcome.HUNG)


def test_a_search_in_which_nothing_can_be_compiled_ends_with_its_budget(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = 0

    def interrupted(
        sources: Sequence[tuple[Source, frozenset[IsaFeature]]], *, toolchain: Toolchain
    ) -> list[Build | CompilationFailed | CompilationInterrupted]:
        nonlocal compiled
        compiled += len(sources)
        return [CompilationInterrupted(f"{toolchain.text} could not write.") for _ in sources]

    monkeypatch.setattr("gemm_tuner.tuning.attempt.compile_kernels", interrupted)
    (result,) = sweep(
        PROBLEM,
        contexts=[ExecutionContext()],
        cpu=detect_cpu(),
        repository=repository,
        settings=SweepSettings(
            toolchain=find_toolchain(),
            budget_s=0.1,
            baseline="scalar",
            plan=Plan(name="random"),
        ),
        on_progress=lambda _progress: None,
        is_stopped=lambda: compiled > 100,
    )

    assert 0 < compiled <= 100
    assert result.verdict.decision is Decision.BASELINE
    assert not result.is_interrupted
