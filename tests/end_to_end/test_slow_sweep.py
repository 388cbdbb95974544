"""A sweep of a problem that counts as slow, with kernels that are wrong only in whole calls."""

from pathlib import Path

import pytest
from planted_times import plant_speeds_of
from saboteur import PLANTED

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.micro_kernel import MicroKernelFamily
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.source import Source
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning import slices
from gemm_tuner.tuning.attempt import Render
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep

PROBLEM = Problem.parse("f32 1..128x64x48 nk bias")
PART = Problem.parse("f32 1..64x64x48 nk bias")


_MARK = "call.m > 64"


def wrong_below_row_64(victim: Candidate) -> Render:
    """Render a candidate wrong in calls that have more rows than the part."""

    def render_broken(problem: Problem, candidate: Candidate, family: MicroKernelFamily) -> Source:
        source = render(problem, candidate, family)
        if candidate != victim:
            return source
        whole, broken = PLANTED[Outcome.WRONG]
        below = broken.replace("call.y[0] +=", f"if ({_MARK})\n        call.y[64 * call.ldy] +=")
        assert below != broken
        assert whole in source.text
        return Source(text=source.text.replace(whole, below))

    return render_broken


def _speed(trial: Trial) -> float:
    assert trial.measurement is not None
    return trial.measurement.ratio.median


@pytest.mark.proof
@pytest.mark.parametrize(("threads", "regime"), [(1, Regime.COLD_WEIGHTS), (2, Regime.HOT)])
def test_what_is_wrong_outside_the_slice_is_found_and_not_served(
    threads: int, regime: Regime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = Repository(open_database(f"sqlite:///{tmp_path}/slow.sqlite3"))
    monkeypatch.setattr(slices, "SLOW_CALL_S", 1e-7)
    context = ExecutionContext(threads=threads, regime=regime)
    space = Space(problem=PROBLEM, cpu=detect_cpu(), threads=threads, regime=regime)
    (victim,) = shortlist(space, 1)
    plant_speeds_of(monkeypatch, lambda build: 1.0 + (_MARK in build.source.text))

    (result,) = sweep(
        PROBLEM,
        contexts=[context],
        cpu=detect_cpu(),
        repository=repository,
        settings=SweepSettings(
            toolchain=find_toolchain(), budget_s=1.0, render=wrong_below_row_64(victim)
        ),
        on_progress=lambda _progress: None,
        is_stopped=lambda: False,
    )

    raced = [trial for trial in repository.trials(problem=PART) if trial.measurement]
    whole = repository.trials(problem=PROBLEM)
    assert result.raced_on == PART.text
    assert {trial.stage for trial in raced} == {Stage.RACE}
    assert {trial.outcome for trial in repository.trials(problem=PART)} == {Outcome.CORRECT}
    assert {trial.outcome for trial in whole} == {Outcome.CORRECT, Outcome.WRONG}
    assert Stage.RACE not in {trial.stage for trial in whole if trial.measurement}
    assert [trial.candidate for trial in whole if trial.outcome is Outcome.WRONG] == [victim]
    assert max(raced, key=_speed).candidate == victim
    assert result.verdict.candidate not in {None, victim}
