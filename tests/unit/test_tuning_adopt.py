"""When a verdict is up to date, and why it is measured again."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from samples import CONTEXT, make_artifact, make_disturbed_trial, make_trial

from gemm_tuner.build.compile import compile_flags
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import Raced
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning import race
from gemm_tuner.tuning.adopt import NOT_BELIEVED, NOT_TIMED, why_measured
from gemm_tuner.tuning.generator import generator_version
from gemm_tuner.tuning.settings import SweepSettings

GCC = Toolchain(name="gcc", version="12.2.0", command=("g++",))
PROBLEM = Problem.parse("f32 8x48x64 nk bias")
ISA = family_named("avx512_f32").isa
CANDIDATE = make_trial().candidate
RACED = (Raced(package="onednn 2023.2.0", baseline="onednn 3.2.0", call_ns=1000.0),)


def artifact() -> Artifact:
    return make_artifact(required_isa=ISA, toolchain=GCC.text, flags=compile_flags(ISA, GCC))


def trial_of(**changes: object) -> Trial:
    """Return a confirming trial by this generator and compiler, beside the libraries installed."""
    trial = make_trial(
        problem=PROBLEM, toolchain=GCC.text, generator=generator_version(), artifact=artifact()
    )
    assert trial.measurement is not None
    trial = replace(trial, measurement=replace(trial.measurement, raced=RACED))
    return replace(trial, **changes)  # type: ignore[arg-type]  # fields by name


@pytest.fixture(autouse=True)
def _only_onednn_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "raced_packages", lambda _seconds: ("onednn 2023.2.0",))


def ask(repository: Repository, *, again: bool = False, context: ExecutionContext = CONTEXT) -> str:
    return why_measured(
        PROBLEM,
        context,
        cpu=trial_of().cpu,
        repository=repository,
        settings=SweepSettings(toolchain=GCC, again=again),
    )


def test_what_nobody_timed_here_is_measured(repository: Repository) -> None:
    repository.add_imported([trial_of()])
    repository.add_trial(trial_of(stage=Stage.FINAL))

    assert ask(repository) == NOT_TIMED


def test_what_this_version_confirmed_is_up_to_date(repository: Repository) -> None:
    repository.add_trial(trial_of())

    assert ask(repository) == ""
    assert ask(repository, again=True)
    assert ask(repository, context=ExecutionContext(threads=2)) == NOT_TIMED


def test_what_failed_since_or_was_disturbed_is_measured(repository: Repository) -> None:
    repository.add_trial(trial_of())
    repository.add_trial(trial_of(outcome=Outcome.WRONG, measurement=None, detail="0 is not 1"))

    assert ask(repository) == NOT_TIMED

    disturbed = make_disturbed_trial(nr=32)
    repository.add_trial(trial_of(candidate=disturbed.candidate, measurement=disturbed.measurement))

    assert ask(repository) == NOT_BELIEVED


def _by_another_generator() -> Trial:
    return trial_of(generator="gemm-tuner 0.0.1+before")


def _by_another_compiler() -> Trial:
    older = replace(artifact(), toolchain="gcc 11.1.0")
    return trial_of(toolchain=older.toolchain, artifact=older)


def _with_other_flags() -> Trial:
    return trial_of(artifact=replace(artifact(), flags=("-O1",)))


def _beside_another_version() -> Trial:
    trial = trial_of()
    assert trial.measurement is not None
    raced = (replace(RACED[0], package="onednn 2022.1.0"),)
    return replace(trial, measurement=replace(trial.measurement, raced=raced))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (_by_another_generator, "another generator, gemm-tuner 0.0.1+before"),
        (_by_another_compiler, "another compiler or with other flags, gcc 11.1.0"),
        (_with_other_flags, "another compiler or with other flags"),
        (_beside_another_version, "beside onednn 3.2.0, and other libraries would be raced"),
    ],
)
def test_what_another_generator_compiler_or_library_is_behind_is_measured(
    repository: Repository, make: Callable[[], Trial], told: str
) -> None:
    repository.add_trial(make())

    assert told in ask(repository)


def test_the_last_confirmation_counts(repository: Repository) -> None:
    repository.add_trial(_by_another_generator())
    repository.add_trial(trial_of(artifact=replace(artifact(), sha256="a" * 64)))

    assert ask(repository) == ""
